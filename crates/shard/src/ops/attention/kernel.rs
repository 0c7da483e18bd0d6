//! Attention of some queries to some keys of one rank, and its gradients.

use isobar_array::{Generator, Window};
use tch::{Device, Kind, TchError, Tensor};

use super::torch;
use crate::error::Result;

/// The tensors, all `[batch, heads, sequence, features]`.
pub(super) struct Inputs<'a> {
    pub(super) query: &'a Tensor,
    pub(super) key: &'a Tensor,
    pub(super) value: &'a Tensor,
    pub(super) mask: Option<&'a Tensor>,
}

/// Elements of the matrix of scores that are made at once.
const TILE: i64 = 1 << 21;

/// Data that is the same for all blocks.
pub(super) struct Kernel {
    pub(super) scale: f64,
    pub(super) dropout: Option<Dropout>,
    /// True if the mask's gradient is needed.
    pub(super) mask_gradient: bool,
}

/// Dropout of the softmax: a draw over the global matrix of scores.
pub(super) struct Dropout {
    pub(super) p: f64,
    /// In the state of the draw.
    pub(super) generator: Generator,
    /// The scores of all ranks.
    pub(super) scores: Window,
    /// First index and extent of this rank's part of the dims before the queries.
    pub(super) lead: Vec<(i64, i64)>,
}

/// Queries and the keys that they attend to: positions within the rank's tensors and the global ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    /// First query within the rank's, and in the sequence.
    pub(super) query: (i64, i64),
    pub(super) queries: i64,
    /// First key within the block, and in the sequence.
    pub(super) key: (i64, i64),
    pub(super) keys: i64,
    /// True if query i of the tile attends to keys up to i only.
    pub(super) diagonal: bool,
}

/// Queries `[batch, heads, queries, features]`, a block of keys and values, and the mask of all queries and keys.
pub(super) struct Operands<'a> {
    pub(super) query: &'a Tensor,
    pub(super) key: &'a Tensor,
    pub(super) value: &'a Tensor,
    /// Added to the scores; one or all of batch, heads, queries, keys.
    pub(super) mask: Option<&'a Tensor>,
    /// Offset of the block's keys in the mask.
    pub(super) mask_shift: i64,
}

/// Result so far, normalised, and the logarithm of the sum of the exponentials of the scores.
pub(super) struct Running {
    pub(super) output: Tensor,
    pub(super) log_sum: Tensor,
}

/// Gradients so far.
pub(super) struct Gradients {
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) mask: Option<Tensor>,
}

/// The dtype that statistics and sums have.
pub(super) fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

impl Running {
    /// Nothing seen yet.
    pub(super) fn new(query: &Tensor, features: i64) -> Result<Self> {
        let shape = query.size();
        let options = (wide(query.kind()), query.device());
        Ok(Self {
            output: torch(Tensor::f_zeros([shape[0], shape[1], shape[2], features], options))?,
            log_sum: torch(Tensor::f_full(&shape[..3], f64::NEG_INFINITY, options))?,
        })
    }

    /// Takes in what these queries got from other keys.
    fn merge(&self, at: i64, output: &Tensor, log_sum: &Tensor) -> Result<(), TchError> {
        let queries = log_sum.size()[2];
        let mut own = self.output.f_narrow(2, at, queries)?;
        let mut sum = self.log_sum.f_narrow(2, at, queries)?;
        let both = sum.f_logaddexp(log_sum)?;
        // Queries that have seen nothing: their weights are zero, not NaN.
        let reference = finite(&both)?;
        let weight = |part: &Tensor| part.f_sub(&reference)?.f_exp()?.f_unsqueeze(-1);
        let _ = own.f_mul_(&weight(&sum)?)?;
        let _ = own.f_addcmul_(&output.f_to_kind(own.kind())?, &weight(log_sum)?)?;
        sum.f_copy_(&both)
    }
}

/// Replaces −∞ by 0.
pub(super) fn finite(log_sum: &Tensor) -> Result<Tensor, TchError> {
    log_sum.f_masked_fill(&log_sum.f_eq(f64::NEG_INFINITY)?, 0.0)
}

impl Kernel {
    /// Attends the tile's queries to its keys.
    pub(super) fn forward(&self, x: &Operands<'_>, tile: &Tile, running: &Running) -> Result<()> {
        if self.is_fused(x) {
            return torch(self.fused_forward(x, tile, running));
        }
        self.tiles(x, tile).into_iter().try_for_each(|tile| self.plain_forward(x, &tile, running))
    }

    /// Adds the tile's part of the gradients. `output` and `log_sum` are those of all keys, `log_sum` finite.
    pub(super) fn backward(
        &self,
        x: &Operands<'_>,
        tile: &Tile,
        done: (&Tensor, &Tensor),
        gradient: &Tensor,
        into: &Gradients,
    ) -> Result<()> {
        if self.is_fused(x) {
            return torch(self.fused_backward(x, tile, done, gradient, into));
        }
        self.tiles(x, tile)
            .into_iter()
            .try_for_each(|tile| self.plain_backward(x, &tile, done, gradient, into))
    }

    /// Returns whether libtorch's flash attention applies; it supports neither dropout nor the mask's gradient.
    fn is_fused(&self, x: &Operands<'_>) -> bool {
        let features = x.query.size()[3];
        x.query.device() == Device::Cpu
            && self.dropout.is_none()
            && !self.mask_gradient
            && features > 0
            && features == x.value.size()[3]
    }

    fn fused_forward(&self, x: &Operands<'_>, tile: &Tile, running: &Running) -> Result<(), TchError> {
        let (query, key, value) = cut(x, tile)?;
        let mask = cut_mask(x, tile)?;
        let (output, log_sum) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
            &query,
            &key,
            &value,
            0.0,
            tile.diagonal,
            mask.as_ref(),
            self.scale,
        )?;
        // It says 0 of queries that see no key.
        let log_sum = match &mask {
            Some(mask) => {
                let blind = mask.f_amax(-1, false)?.f_eq(f64::NEG_INFINITY)?;
                log_sum.f_masked_fill(&blind, f64::NEG_INFINITY)?
            }
            None => log_sum,
        };
        running.merge(tile.query.0, &output, &log_sum)
    }

    fn fused_backward(
        &self,
        x: &Operands<'_>,
        tile: &Tile,
        (output, log_sum): (&Tensor, &Tensor),
        gradient: &Tensor,
        into: &Gradients,
    ) -> Result<(), TchError> {
        let (query, key, value) = cut(x, tile)?;
        let rows = |t: &Tensor| t.f_narrow(2, tile.query.0, tile.queries);
        let (by_query, by_key, by_value) =
            Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
                &rows(gradient)?,
                &query,
                &key,
                &value,
                &rows(output)?,
                &rows(log_sum)?,
                0.0,
                tile.diagonal,
                cut_mask(x, tile)?.as_ref(),
                self.scale,
            )?;
        add(&into.query, tile.query.0, &by_query)?;
        add(&into.key, tile.key.0, &sum_groups(by_key, &into.key)?)?;
        add(&into.value, tile.key.0, &sum_groups(by_value, &into.value)?)
    }

    /// Cuts a tile along its queries into tiles of at most [`TILE`] scores, or of one query.
    fn tiles(&self, x: &Operands<'_>, tile: &Tile) -> Vec<Tile> {
        let shape = x.query.size();
        let rows = (TILE / (shape[0] * shape[1] * tile.keys).max(1)).max(1);
        let starts = (0..tile.queries).step_by(rows as usize);
        let part = |from: i64| {
            let queries = rows.min(tile.queries - from);
            Tile { query: (tile.query.0 + from, tile.query.1 + from), queries, ..*tile }
        };
        starts.map(part).collect()
    }

    fn plain_forward(&self, x: &Operands<'_>, tile: &Tile, running: &Running) -> Result<()> {
        let (query, key, value) = torch(cut_wide(x, tile))?;
        let mut scores = torch(self.scores(x, tile, &query, &key))?;
        let largest = torch(scores.f_amax(-1, true))?;
        let shift = torch(finite(&largest))?;
        let mut weights = torch(scores.f_sub_(&shift).and_then(|mut s| s.f_exp_()))?;
        let sum = torch(weights.f_sum_dim_intlist(-1, true, None))?;
        if let Some(kept) = self.kept(tile, &weights)? {
            let _ = torch(weights.f_mul_(&kept))?;
        }
        let merged = || {
            let divisor = sum.f_masked_fill(&sum.f_eq(0.0)?, 1.0)?;
            let output = weights.f_matmul(&value)?.f_div(&divisor)?;
            let log_sum = sum.f_log()?.f_add(&shift)?.f_squeeze_dim(-1)?;
            running.merge(tile.query.0, &output, &log_sum)
        };
        torch(merged())
    }

    fn plain_backward(
        &self,
        x: &Operands<'_>,
        tile: &Tile,
        (output, log_sum): (&Tensor, &Tensor),
        gradient: &Tensor,
        into: &Gradients,
    ) -> Result<()> {
        let (query, key, value) = torch(cut_wide(x, tile))?;
        let kind = query.kind();
        let rows = |t: &Tensor| t.f_narrow(2, tile.query.0, tile.queries)?.f_to_kind(kind);
        let (gradient, output) = (torch(rows(gradient))?, torch(rows(output))?);
        let log_sum = torch(rows(log_sum).and_then(|t| t.f_unsqueeze(-1)))?;
        let mut scores = torch(self.scores(x, tile, &query, &key))?;
        let weights = torch(scores.f_sub_(&log_sum).and_then(|mut s| s.f_exp_()))?;
        let kept = self.kept(tile, &weights)?;
        let run = || {
            let dropped = match &kept {
                Some(kept) => weights.f_mul(kept)?,
                None => weights.shallow_clone(),
            };
            let by_value = dropped.f_transpose(-2, -1)?.f_matmul(&gradient)?;
            let mut by_weight = gradient.f_matmul(&value.f_transpose(-2, -1)?)?;
            if let Some(kept) = &kept {
                let _ = by_weight.f_mul_(kept)?;
            }
            let mean = gradient.f_mul(&output)?.f_sum_dim_intlist(-1, true, None)?;
            let by_score = by_weight.f_sub_(&mean)?.f_mul_(&weights)?;
            if let Some(sum) = &into.mask {
                let part = cut_like(sum, tile, x.mask_shift)?;
                let _ = part.shallow_clone().f_add_(&sum_to(&by_score, &part.size())?)?;
            }
            add(&into.query, tile.query.0, &by_score.f_matmul(&key)?.f_mul_scalar(self.scale)?)?;
            let by_key = by_score.f_transpose(-2, -1)?.f_matmul(&query)?.f_mul_scalar(self.scale)?;
            add(&into.key, tile.key.0, &sum_groups(by_key, &into.key)?)?;
            add(&into.value, tile.key.0, &sum_groups(by_value, &into.value)?)
        };
        torch(run())
    }

    fn scores(
        &self,
        x: &Operands<'_>,
        tile: &Tile,
        query: &Tensor,
        key: &Tensor,
    ) -> Result<Tensor, TchError> {
        let scaled = query.f_mul_scalar(self.scale)?;
        let mut scores = scaled.f_matmul(&key.f_transpose(-2, -1)?)?;
        if let Some(mask) = cut_mask(x, tile)? {
            let _ = scores.f_add_(&mask)?;
        }
        if tile.diagonal {
            let hidden = hidden(tile, query.device())?;
            let _ = scores.f_masked_fill_(&hidden, f64::NEG_INFINITY)?;
        }
        Ok(scores)
    }

    /// Returns the dropout mask of the weights.
    pub(super) fn kept(&self, tile: &Tile, weights: &Tensor) -> Result<Option<Tensor>> {
        let Some(dropout) = &self.dropout else { return Ok(None) };
        let mut window = dropout.scores.clone();
        for (dim, &(start, len)) in dropout.lead.iter().enumerate() {
            window = window.narrow(dim, start, len)?;
        }
        let dims = window.shape().len();
        let window =
            window.narrow(dims - 2, tile.query.1, tile.queries)?.narrow(dims - 1, tile.key.1, tile.keys)?;
        // A clone is in the state of the draw; drawing from it leaves that state as it is.
        let draw = dropout.generator.clone();
        let mask = draw.dropout_mask(&window, dropout.p, (weights.kind(), weights.device()))?;
        Ok(Some(torch(mask.f_reshape(weights.size()))?))
    }
}

/// Returns the mask of the keys of a tile on the diagonal that the queries do not see.
fn hidden(tile: &Tile, device: Device) -> Result<Tensor, TchError> {
    let options = (Kind::Int64, device);
    let rows = Tensor::f_arange_start(tile.query.1, tile.query.1 + tile.queries, options)?;
    let keys = Tensor::f_arange_start(tile.key.1, tile.key.1 + tile.keys, options)?;
    keys.f_unsqueeze(0)?.f_gt_tensor(&rows.f_unsqueeze(1)?)
}

/// The tile's queries, keys and values; keys and values of grouped queries repeated.
fn cut(x: &Operands<'_>, tile: &Tile) -> Result<(Tensor, Tensor, Tensor), TchError> {
    let query = x.query.f_narrow(2, tile.query.0, tile.queries)?;
    let heads = query.size()[1];
    let rows = |t: &Tensor| repeated(&t.f_narrow(2, tile.key.0, tile.keys)?, heads);
    Ok((query, rows(x.key)?, rows(x.value)?))
}

fn cut_wide(x: &Operands<'_>, tile: &Tile) -> Result<(Tensor, Tensor, Tensor), TchError> {
    let (query, key, value) = cut(x, tile)?;
    let kind = wide(query.kind());
    Ok((query.f_to_kind(kind)?, key.f_to_kind(kind)?, value.f_to_kind(kind)?))
}

fn cut_mask(x: &Operands<'_>, tile: &Tile) -> Result<Option<Tensor>, TchError> {
    x.mask.map(|mask| cut_like(mask, tile, x.mask_shift)).transpose()
}

/// The tile's part of a mask; dims of extent one stay.
fn cut_like(mask: &Tensor, tile: &Tile, shift: i64) -> Result<Tensor, TchError> {
    let mut part = mask.shallow_clone();
    if part.size()[2] != 1 {
        part = part.f_narrow(2, tile.query.0, tile.queries)?;
    }
    if part.size()[3] != 1 {
        part = part.f_narrow(3, shift + tile.key.0, tile.keys)?;
    }
    Ok(part)
}

/// `[batch, heads / g, …]` with each head g times.
pub(super) fn repeated(tensor: &Tensor, heads: i64) -> Result<Tensor, TchError> {
    let shape = tensor.size();
    if shape[1] == heads || shape[1] == 0 {
        return Ok(tensor.shallow_clone());
    }
    let groups = heads / shape[1];
    let wide = tensor.f_unsqueeze(2)?.f_expand([shape[0], shape[1], groups, shape[2], shape[3]], false)?;
    wide.f_reshape([shape[0], heads, shape[2], shape[3]])
}

/// The transpose of [`repeated`]: the sum over the queries' heads of each head of `like`.
pub(super) fn sum_groups(gradient: Tensor, like: &Tensor) -> Result<Tensor, TchError> {
    let (shape, heads) = (gradient.size(), like.size()[1]);
    if shape[1] == heads || heads == 0 {
        return Ok(gradient);
    }
    let grouped = gradient.f_reshape([shape[0], heads, shape[1] / heads, shape[2], shape[3]])?;
    grouped.f_sum_dim_intlist(2, false, None)
}

fn add(sum: &Tensor, at: i64, part: &Tensor) -> Result<(), TchError> {
    let _ = sum.f_narrow(2, at, part.size()[2])?.f_add_(part)?;
    Ok(())
}

/// The sum over the dims that were broadcast from `shape`.
pub(super) fn sum_to(gradient: &Tensor, shape: &[i64]) -> Result<Tensor, TchError> {
    let from = gradient.size();
    let dims: Vec<i64> =
        (0..shape.len()).filter(|&dim| shape[dim] == 1 && from[dim] != 1).map(|dim| dim as i64).collect();
    match dims.is_empty() {
        true => Ok(gradient.shallow_clone()),
        false => gradient.f_sum_dim_intlist(dims, true, None),
    }
}
