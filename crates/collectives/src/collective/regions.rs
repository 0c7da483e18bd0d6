//! The four mappings in and out of a region in which ranks hold different parts of one model, after Megatron-LM
//! (Shoeybi et al. 2019, arXiv:1909.08053).
//!
//! They pair global tensors: a value that is replicated over the group counts once, so that the gradient of a
//! replicated tensor is whole on every rank, never P-fold and never a P-th. Every rank of the group calls, forward and
//! backward.

use std::sync::Arc;

use tch::Tensor;

use crate::collective::linear::{differentiable, records};
use crate::collective::ops::extent;
use crate::collective::{maps, start};
use crate::engine::group::Group;
use crate::error::Result;
use crate::local::reduce::ReduceOp;

/// Into a region, from a replicated tensor that the ranks use differently: identity; backward adds the gradients up.
///
/// # Errors
///
/// None forward; in backward, those of the exchange.
pub fn copy_to_parallel_region(tensor: &Tensor, group: &Group) -> Result<Tensor> {
    match group.size() == 1 || !records(tensor) {
        true => Ok(tensor.shallow_clone()),
        false => differentiable(Arc::new(maps::CopyToRegion(group.clone())), tensor),
    }
}

/// Out of a region, where each rank holds a summand: the sum, on every rank; backward is the identity. The tensor
/// itself is not changed.
///
/// # Errors
///
/// Those of the exchange.
pub fn reduce_from_parallel_region(tensor: &Tensor, group: &Group) -> Result<Tensor> {
    if group.size() == 1 {
        return Ok(tensor.shallow_clone());
    }
    match records(tensor) {
        true => differentiable(Arc::new(maps::ReduceFromRegion(group.clone())), tensor),
        false => start::all_reduce(tensor, ReduceOp::Sum, group)?.wait(),
    }
}

/// Into a region, from a replicated tensor: the rank's slice along `dim`, of extent `sizes[rank]` (`None`: equal
/// slices); backward gathers the slices' gradients.
///
/// # Errors
///
/// Sizes or a dim that do not fit; in backward, those of the exchange.
pub fn scatter_to_parallel_region(
    tensor: &Tensor,
    dim: i64,
    sizes: Option<&[i64]>,
    group: &Group,
) -> Result<Tensor> {
    let call = group.call("scatter_to_parallel_region");
    let at = call.dim(tensor, dim)?;
    let sizes = call.parts(sizes, tensor.size()[at])?;
    match group.size() {
        1 => Ok(tensor.shallow_clone()),
        _ => differentiable(
            Arc::new(maps::ScatterToRegion { group: group.clone(), sizes, dim: at as i64 }),
            tensor,
        ),
    }
}

/// Out of a region, where each rank holds a slice of extent `sizes[rank]` along `dim` (`None`: equal slices): the whole,
/// on every rank; backward takes the rank's slice of the gradient, by the same sizes.
///
/// # Errors
///
/// Sizes, extents or a dim that do not fit; those of the exchange.
pub fn gather_from_parallel_region(
    tensor: &Tensor,
    dim: i64,
    sizes: Option<&[i64]>,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 {
        start::all_gather_v(tensor, sizes, dim, group)?.wait().map(drop)?;
        return Ok(tensor.shallow_clone());
    }
    // The arguments are checked by the exchange, as its own, so that ranks that wait there hear of a refusal.
    let sizes = sizes.map_or_else(|| vec![extent(tensor, dim); group.size()], <[i64]>::to_vec);
    differentiable(Arc::new(maps::GatherFromRegion { group: group.clone(), sizes, dim }), tensor)
}
