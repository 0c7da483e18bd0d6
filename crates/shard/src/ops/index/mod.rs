//! Selection by indices that only values know, and orders: along split dims, elements travel to where they are asked for, and
//! no others.

mod add;
mod pick;
mod places;
mod route;
mod sort;

pub(super) use route::Owners;
use tch::{Device, Kind, TchError, Tensor};

use crate::layout::{Dim, Interval, Layout};
use crate::tensor::ShardTensor;

/// The global indices along a dim that this rank has, in its order.
pub(crate) fn own_indices(layout: &Layout, dim: usize, device: Device) -> Result<Tensor, TchError> {
    indices_of(layout.intervals()[dim], device)
}

/// The indices of intervals, one after the other.
pub(crate) fn indices_of(intervals: &[Interval], device: Device) -> Result<Tensor, TchError> {
    let options = (Kind::Int64, device);
    let pieces = intervals.iter().map(|part| Tensor::f_arange_start(part.start, part.end(), options));
    let pieces: Vec<Tensor> = pieces.collect::<Result<_, _>>()?;
    match &pieces[..] {
        [] => Tensor::f_zeros([0], options),
        many => Tensor::f_cat(many, 0),
    }
}

/// An operator on local tensors whose indices differ from rank to rank: what one rank finds wrong, the others get at their next
/// call on the mesh.
fn propagate_error<T>(
    op: &'static str,
    layout: &Layout,
    result: Result<T, TchError>,
) -> crate::error::Result<T> {
    let result = super::torch(op, result);
    if let Err(error) = &result {
        for group in layout.ranks()?.groups() {
            let _ = group.refuse(op, error.to_string());
        }
    }
    result
}

/// Returns resolved, detached indices of dtype `Int64`, which exchanges take.
fn resolved_indices(index: &ShardTensor) -> crate::error::Result<ShardTensor> {
    let index = index.resolved()?.detach();
    if index.kind() == Kind::Int { index.to_kind(Kind::Int64) } else { Ok(index) }
}

/// Returns the split of indices along a sharded dim: unchanged if the same axes shard them, otherwise that of the dim.
fn split_of_indices(dim: &Dim, indices: &Dim) -> Dim {
    match indices.axes == dim.axes && indices.is_consecutive() {
        true => indices.clone(),
        false => dim.scaled(indices.extent()),
    }
}

/// Returns the layout of `x` with the splits that `other` has of dims that `x` holds in full, except for the dim `at`, as far as
/// their axes are free.
fn split_beside(x: &Layout, other: &Layout, at: usize) -> Layout {
    let (mut dims, mut used) = (x.dims().to_vec(), x.sharding_axes());
    for (index, dim) in other.dims().iter().enumerate().filter(|&(index, _)| index != at) {
        let fits = dim.extent() == dims[index].extent() && dim.is_consecutive();
        if dim.is_split() && !dims[index].is_split() && fits && is_free(dim, &used) {
            used.extend(&dim.axes);
            dims[index] = dim.clone();
        }
    }
    x.with_dims(dims)
}

/// `dims` with one replaced.
fn replaced(dims: &[Dim], at: usize, by: Dim) -> Vec<Dim> {
    let mut dims = dims.to_vec();
    dims[at] = by;
    dims
}

/// Axes of `dim` that none of the others use.
fn is_free(dim: &Dim, others: &[usize]) -> bool {
    !dim.axes.iter().any(|axis| others.contains(axis))
}
