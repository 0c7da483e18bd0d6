//! Operands of an element-wise operator, brought to layouts that fit each other.

use tch::Tensor;

use super::refuse;
use crate::error::Result;
use crate::layout::{Dim, Layout, Placement};
use crate::tensor::{ShardTensor, same_mesh};

/// The shape that several broadcast to.
pub(crate) fn broadcast(op: &'static str, shapes: &[&[i64]]) -> Result<Vec<i64>> {
    let dims = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut result = vec![1; dims];
    for shape in shapes {
        for (extent, wide) in shape.iter().rev().zip(result.iter_mut().rev()) {
            match (*extent, *wide) {
                (1, _) => {}
                (extent, 1) => *wide = extent,
                (extent, wide) if extent == wide => {}
                _ => return refuse(op, format!("the shapes {shapes:?} do not broadcast to each other")),
            }
        }
    }
    Ok(result)
}

/// The layout of the result, and the operands' local tensors in it: the largest operand stays where it is, and others follow.
/// Dims that are broadcast from the largest operand are split as a smaller one has them.
pub(crate) fn align(op: &'static str, operands: &[&ShardTensor]) -> Result<(Layout, Vec<Tensor>)> {
    let first = operands[0].layout();
    if !first.is_partial() && operands[1..].iter().all(|operand| operand.layout() == first) {
        return Ok((first.clone(), operands.iter().map(|operand| operand.local().shallow_clone()).collect()));
    }
    let operands: Vec<ShardTensor> =
        operands.iter().map(|operand| operand.resolved()).collect::<Result<_>>()?;
    same_mesh(op, &operands.iter().collect::<Vec<_>>())?;
    let shapes: Vec<&[i64]> = operands.iter().map(ShardTensor::shape).collect();
    let shape = broadcast(op, &shapes)?;
    let mut order: Vec<&ShardTensor> = operands.iter().collect();
    order.sort_by_key(|operand| std::cmp::Reverse(operand.layout().numel()));
    let mut dims: Vec<Dim> = shape.iter().map(|&extent| Dim::whole(extent)).collect();
    let mut used = Vec::new();
    // Smaller operands are gathered rather than a larger one, which is whole, cut and its gradient gathered. Along dims that
    // are broadcast from the largest, nothing of it is cut, and the split of a smaller operand is kept.
    let most = order[0].layout().numel();
    let is_largest = |operand: &ShardTensor| operand.layout().numel() == most;
    let is_broadcast = |at: usize| {
        let extent = |operand: &ShardTensor| {
            (at + operand.ndim()).checked_sub(shape.len()).map_or(1, |dim| operand.shape()[dim])
        };
        shape[at] != 1
            && operands.iter().filter(|operand| is_largest(operand)).all(|operand| extent(operand) == 1)
    };
    for operand in order {
        let shift = shape.len() - operand.ndim();
        for (index, dim) in operand.layout().dims().iter().enumerate() {
            let target = &mut dims[index + shift];
            let free = !dim.axes.iter().any(|axis| used.contains(axis))
                && (is_largest(operand) || is_broadcast(index + shift));
            if dim.is_split() && !target.is_split() && free && dim.extent() == shape[index + shift] {
                used.extend(&dim.axes);
                *target = dim.clone();
            }
        }
    }
    let layout = with_dims_of(&operands.iter().map(ShardTensor::layout).collect::<Vec<_>>(), dims);
    let locals = operands.iter().map(|operand| fit(operand, &layout)).collect::<Result<_>>()?;
    Ok((layout, locals))
}

/// The part of an operand that meets this rank's part of a result of that layout, which it is broadcast to.
pub(crate) fn fit(operand: &ShardTensor, layout: &Layout) -> Result<Tensor> {
    let shift = layout.ndim() - operand.ndim();
    let of_result = |(index, dim): (usize, &Dim)| {
        let wide = &layout.dims()[index + shift];
        if dim.extent() == wide.extent() { wide.clone() } else { Dim::whole(dim.extent()) }
    };
    let dims = operand.layout().dims().iter().enumerate().map(of_result).collect();
    let target = strided_like(operand.layout(), layout, shift, dims);
    let moved = operand.to_layout(&target)?;
    let own = target.sharding_axes();
    let differing: Vec<usize> =
        layout.sharding_axes().into_iter().filter(|axis| !own.contains(axis)).collect();
    moved.mark_varying(&differing)
}

/// The layout of these dims on the mesh of the first; strided placements as the inputs have them.
fn with_dims_of(layouts: &[&Layout], dims: Vec<Dim>) -> Layout {
    let mut placements = vec![Placement::Replicate; layouts[0].placements().len()];
    for (index, dim) in dims.iter().enumerate() {
        for &axis in &dim.axes {
            let strided = layouts.iter().map(|layout| layout.placements()[axis]);
            let strided = strided.into_iter().find(|p| matches!(p, Placement::StridedShard { .. }));
            placements[axis] = match strided {
                Some(strided) if !dim.is_consecutive() => strided.with_dim(index),
                _ => Placement::Shard(index),
            };
        }
    }
    layouts[0].with_placements(placements, dims)
}

/// The layout of an operand's dims, whose placements are those of the result, `shift` dims further on.
fn strided_like(own: &Layout, result: &Layout, shift: usize, dims: Vec<Dim>) -> Layout {
    let mut placements = vec![Placement::Replicate; own.placements().len()];
    for (index, dim) in dims.iter().enumerate() {
        for &axis in &dim.axes {
            debug_assert_eq!(result.placements()[axis].dim(), Some(index + shift));
            placements[axis] = result.placements()[axis].with_dim(index);
        }
    }
    own.with_placements(placements, dims)
}
