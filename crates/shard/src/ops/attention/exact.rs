//! Gradients of attention, spelled out, so that they have gradients themselves.

use tch::{TchError, Tensor};

use super::kernel::{Inputs, Kernel, Tile, repeated, sum_groups, sum_to, wide};
use super::torch;
use crate::error::Result;
use crate::layout::Interval;
use crate::ops::index::indices_of;

/// The gradients of query, key, value and mask, given that of the result; the whole matrix of scores at once. `keys` lie
/// consecutive in memory.
pub(super) fn exact(
    kernel: &Kernel,
    causal: bool,
    x: &Inputs<'_>,
    queries: &[Interval],
    keys: &[Interval],
    gradient: &Tensor,
) -> Result<[Option<Tensor>; 4]> {
    let kind = wide(x.query.kind());
    let heads = x.query.size()[1];
    let wide = |t: &Tensor| torch(t.f_to_kind(kind));
    let (query, gradient) = (wide(x.query)?, wide(gradient)?);
    let (key, value) = (torch(repeated(&wide(x.key)?, heads))?, torch(repeated(&wide(x.value)?, heads))?);
    let (rows, columns) =
        (torch(indices_of(queries, x.query.device()))?, torch(indices_of(keys, x.query.device()))?);
    let scores = || {
        let mut scores = query.f_mul_scalar(kernel.scale)?.f_matmul(&key.f_transpose(-2, -1)?)?;
        if let Some(mask) = x.mask {
            let mask =
                if mask.size()[3] == 1 { mask.shallow_clone() } else { mask.f_index_select(3, &columns)? };
            scores = scores.f_add(&mask)?;
        }
        if causal {
            let hidden = columns.f_unsqueeze(0)?.f_gt_tensor(&rows.f_unsqueeze(1)?)?;
            scores = scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?;
        }
        Ok(scores)
    };
    let scores = torch(scores())?;
    let weights = || {
        // Rows that see no key: zeros, whose gradient is zero too.
        let blind = scores.f_eq(f64::NEG_INFINITY)?.f_all_dim(-1, true)?;
        scores.f_masked_fill(&blind, 0.0)?.f_softmax(-1, None)?.f_masked_fill(&blind, 0.0)
    };
    let weights = torch(weights())?;
    let kept = kept(kernel, queries, keys, &weights)?;
    let run = || {
        let drop = |t: Tensor| match &kept {
            Some(kept) => t.f_mul(kept),
            None => Ok(t),
        };
        let by_value = drop(weights.shallow_clone())?.f_transpose(-2, -1)?.f_matmul(&gradient)?;
        let by_weight = drop(gradient.f_matmul(&value.f_transpose(-2, -1)?)?)?;
        let mean = by_weight.f_mul(&weights)?.f_sum_dim_intlist(-1, true, None)?;
        let by_score = by_weight.f_sub(&mean)?.f_mul(&weights)?;
        let by_mask = match x.mask {
            Some(mask) if kernel.mask_gradient => Some(mask_columns(mask, &by_score, &columns)?),
            _ => None,
        };
        let by_query = by_score.f_matmul(&key)?.f_mul_scalar(kernel.scale)?;
        let by_key = by_score.f_transpose(-2, -1)?.f_matmul(&query)?.f_mul_scalar(kernel.scale)?;
        let narrow = |t: Tensor, like: &Tensor| sum_groups(t, like)?.f_to_kind(like.kind());
        Ok([
            Some(narrow(by_query, x.query)?),
            Some(narrow(by_key, x.key)?),
            Some(narrow(by_value, x.value)?),
            by_mask,
        ])
    };
    torch(run())
}

/// The gradient of scores, whose columns are in another order, as that of the mask.
fn mask_columns(mask: &Tensor, by_score: &Tensor, columns: &Tensor) -> Result<Tensor, TchError> {
    let mut gradient = by_score.shallow_clone();
    if mask.size()[3] != 1 {
        gradient = by_score.f_index_select(3, &columns.f_argsort(0, false)?)?;
    }
    sum_to(&gradient, &mask.size())?.f_to_kind(mask.kind())
}

fn kept(
    kernel: &Kernel,
    queries: &[Interval],
    keys: &[Interval],
    weights: &Tensor,
) -> Result<Option<Tensor>> {
    if kernel.dropout.is_none() {
        return Ok(None);
    }
    let shape = weights.size();
    let mut rows = Vec::new();
    for queries in queries {
        let mut blocks = Vec::new();
        for keys in keys {
            let tile = Tile {
                query: (0, queries.start),
                queries: queries.len,
                key: (0, keys.start),
                keys: keys.len,
                diagonal: false,
            };
            let size = [shape[0], shape[1], queries.len, keys.len];
            let like = torch(weights.f_new_empty(size, (weights.kind(), weights.device())))?;
            blocks.extend(kernel.kept(&tile, &like)?);
        }
        rows.push(torch(Tensor::f_cat(&blocks, 3))?);
    }
    torch(Tensor::f_cat(&rows, 2)).map(Some)
}
