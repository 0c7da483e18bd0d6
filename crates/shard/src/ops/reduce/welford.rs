//! Mean and squared deviations, merged as Welford's formula has it (Chan, Golub and LeVeque 1979): each rank takes both of its
//! own part, about its own mean, so that a large mean costs no digits.

use tch::{TchError, Tensor};

use super::Over;
use crate::error::Result;
use crate::ops::{torch, wide};
use crate::tensor::ShardTensor;

/// The mean and the sum of squared deviations from it over the dims, which stay; in fp32 at least, replicated along the axes
/// that split the dims. Differentiable.
pub(in crate::ops) fn moments(op: &'static str, x: &ShardTensor, over: &Over) -> Result<(Tensor, Tensor)> {
    let own = torch(
        op,
        part_moments(x.local(), over.dims.as_slice(), over.local_count(x), over.kept.local_shape()),
    )?;
    merged(op, own, x, over)
}

/// Those of all ranks, from those of each one's part.
pub(in crate::ops) fn merged(
    op: &'static str,
    own: (Tensor, Tensor),
    x: &ShardTensor,
    over: &Over,
) -> Result<(Tensor, Tensor)> {
    if over.axes.is_empty() {
        return Ok(own);
    }
    let both = torch(op, Tensor::f_stack(&[&own.0, &own.1], 0))?;
    let everyones = over.everyones(x.layout(), &both)?;
    torch(op, merge(&everyones, &counts(x, over)?))
}

/// Returns the number of elements of each rank that shares the dims, from the layout.
fn counts(x: &ShardTensor, over: &Over) -> Result<Vec<f64>> {
    let layout = x.layout();
    let group = layout.group_along(&over.axes)?;
    let ranks = layout.mesh().ranks();
    let count = |rank: &usize| {
        let shape = layout.local_shape_of(layout.place(&ranks, *rank)?);
        Ok(over.dims.iter().map(|&dim| shape[dim as usize]).product::<i64>() as f64)
    };
    group.ranks().iter().map(count).collect()
}

/// Mean and squared deviations of a part; zeros of no elements.
fn part_moments(x: &Tensor, dims: &[i64], count: i64, kept: &[i64]) -> Result<(Tensor, Tensor), TchError> {
    let wide = wide(x)?;
    if count == 0 {
        // Zeros that are part of the graph.
        let zeros = wide.f_sum_dim_intlist(dims, true, None)?.f_reshape(kept)?;
        return Ok((zeros.shallow_clone(), zeros));
    }
    let mean = wide.f_mean_dim(dims, true, None)?;
    let squares = wide.f_sub(&mean)?.f_square()?.f_sum_dim_intlist(dims, true, None)?;
    Ok((mean, squares))
}

/// `[rank, mean or squares, …]` of parts of so many elements as one.
fn merge(everyones: &Tensor, counts: &[f64]) -> Result<(Tensor, Tensor), TchError> {
    let dims = everyones.dim() - 1;
    let shape: Vec<i64> = std::iter::once(counts.len() as i64).chain(vec![1; dims - 1]).collect();
    let counts =
        Tensor::f_from_slice(counts)?.f_to_device(everyones.device())?.f_to_kind(everyones.kind())?;
    let counts = counts.f_view(shape.as_slice())?;
    let total = counts.f_sum(None)?;
    let (means, squares) = (everyones.f_select(1, 0)?, everyones.f_select(1, 1)?);
    // About the greatest part's mean, so that the sum is of small numbers.
    let at = counts.f_reshape([-1])?.f_argmax(0, false)?;
    let reference = means.f_index_select(0, &at.f_reshape([1])?)?;
    let weights = counts.f_div(&total)?;
    let shift = means.f_sub(&reference)?.f_mul(&weights)?.f_sum_dim_intlist([0].as_slice(), true, None)?;
    let mean = reference.f_add(&shift)?;
    let between = means.f_sub(&mean)?.f_square()?.f_mul(&counts)?;
    let sum = squares.f_add(&between)?.f_sum_dim_intlist([0].as_slice(), false, None)?;
    Ok((mean.f_squeeze_dim(0)?, sum))
}
