//! The collectives, waiting and differentiable, with PhysicsNeMo's signatures.

use std::sync::{Arc, Mutex};

use tch::Tensor;

use crate::collective::linear::{LinearMap, differentiable, records};
use crate::collective::{maps, start};
use crate::engine::group::Group;
use crate::error::Result;
use crate::local::reduce::ReduceOp;

/// Gathers parts of different extents along `dim` on every rank, in rank order.
///
/// `sizes` are the extents of all ranks' parts, the same on all ranks; `None` means that all are equal. The other dims
/// are equal on all ranks. On a group of one the result is the tensor itself.
///
/// Every rank of the group calls. Backward is `reduce_scatter_v` with sum, in fp32 for 16-bit floats where `use_fp32`
/// says so: for P ranks that go on alike, the gradient is P-fold (for a value that counts once, see
/// [`gather_from_parallel_region`](crate::gather_from_parallel_region)).
///
/// # Errors
///
/// Sizes, dim or extents that do not fit; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{all_gather_v, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let rows = [2, 3][group.rank()];
///     let x = Tensor::from(group.rank() as f64).expand([rows, 4], false).set_requires_grad(true);
///     let all = all_gather_v(&x, Some(&[2, 3]), 0, true, &group).unwrap();
///     assert_eq!(all.size(), [5, 4]);
///     assert_eq!(all.double_value(&[4, 0]), 1.0);
/// });
/// ```
pub fn all_gather_v(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    use_fp32: bool,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start::all_gather_v(tensor, sizes, dim, group)?.wait().map(|y| keep(tensor, y));
    }
    let sizes = sizes.map_or_else(|| vec![extent(tensor, dim); group.size()], <[i64]>::to_vec);
    run(tensor, maps::AllGather { group: group.clone(), sizes, dim, use_fp32 })
}

/// Gathers parts of different extents along `dim` at rank `dst`, in rank order. The other ranks get a tensor of
/// extent 0 along `dim`, attached to the graph.
///
/// `sizes` as in [`all_gather_v`]. Every rank calls, and every rank calls backward, which is [`scatter_v`] from `dst`.
///
/// # Errors
///
/// Sizes, dim, extents or a destination that do not fit; the errors of the exchange.
pub fn gather_v(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    dst: usize,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start::gather_v(tensor, sizes, dim, dst, group)?.wait().map(|y| keep(tensor, y));
    }
    let sizes = sizes.map_or_else(|| vec![extent(tensor, dim); group.size()], <[i64]>::to_vec);
    run(tensor, maps::Gather { group: group.clone(), sizes, dim, root: dst, elsewhere: None })
}

/// Hands the parts along `dim` of rank `src`'s tensor out, `sizes[r]` of them to rank r; `None` means equal parts.
///
/// On the other ranks `tensor` says the kind, the device, the extents of the other dims and whether it requires a
/// gradient, as on rank `src`; its extent along `dim` and its values do not matter. Every rank calls, and every rank calls backward, which is [`gather_v`] to `src`; the
/// gradient on the other ranks is zeros.
///
/// # Errors
///
/// Sizes, dim, extents or a source that do not fit; the errors of the exchange.
pub fn scatter_v(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    src: usize,
    group: &Group,
) -> Result<Tensor> {
    let part = if group.size() == 1 || !records(tensor) || sizes.is_none() {
        let part = start::scatter_v(tensor, sizes, dim, src, group)?.wait()?;
        if group.size() == 1 || !records(tensor) {
            return Ok(keep(tensor, part));
        }
        Some(part)
    } else {
        None
    };
    let sizes = match (sizes, &part) {
        (Some(sizes), _) => sizes.to_vec(),
        (None, Some(part)) => vec![extent(part, dim); group.size()],
        (None, None) => Vec::new(),
    };
    let map = maps::Scatter { group: group.clone(), sizes, dim, root: src, input: Some(tensor.size()) };
    match part {
        Some(part) => run(tensor, Computed { value: Mutex::new(Some(part)), map: Arc::new(map) }),
        None => run(tensor, map),
    }
}

/// Combines the ranks' tensors, element by element, and leaves rank r the part of extent `sizes[r]` along `dim`;
/// `None` means equal parts. All have the same shape. 16-bit floats are combined in fp32 where `use_fp32` says so.
///
/// Every rank calls. Sum and mean are differentiable; backward is [`all_gather_v`].
///
/// # Errors
///
/// Sizes or dim that do not fit; a kind that has no such reduction; a gradient asked for through another operation
/// than sum and mean; the errors of the exchange.
pub fn reduce_scatter_v(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    op: ReduceOp,
    use_fp32: bool,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start::reduce_scatter_v(tensor, sizes, dim, op, use_fp32, group)?
            .wait()
            .map(|y| keep(tensor, y));
    }
    let average = linear(op, "reduce_scatter_v", group)?;
    let call_sizes = match sizes {
        Some(sizes) => sizes.to_vec(),
        None => equal_parts("reduce_scatter_v", extent(tensor, dim), group)?,
    };
    run(tensor, maps::ReduceScatter { group: group.clone(), sizes: call_sizes, dim, average, use_fp32 })
}

/// Sends rank q the part of extent `send_sizes[q]` along `dim`, and joins what comes from the ranks, `receive_sizes[r]`
/// from rank r, along the same dim in rank order. `None` means equal parts, sent and received.
///
/// Every rank calls; what q receives from r is what r sends to q. Backward is the same with the sizes exchanged.
///
/// # Errors
///
/// Sizes or dim that do not fit; the errors of the exchange.
pub fn all_to_all_v(
    tensor: &Tensor,
    send_sizes: Option<&[i64]>,
    receive_sizes: Option<&[i64]>,
    dim: i64,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        let work = start::all_to_all_v(tensor, send_sizes, receive_sizes, dim, group)?;
        return work.wait().map(|y| keep(tensor, y));
    }
    let send = match send_sizes {
        Some(sizes) => sizes.to_vec(),
        None => equal_parts("all_to_all_v", extent(tensor, dim), group)?,
    };
    let receive = match receive_sizes {
        Some(sizes) => sizes.to_vec(),
        None => vec![send.get(group.rank()).copied().unwrap_or(0); group.size()],
    };
    run(tensor, maps::AllToAll { group: group.clone(), split: (dim, send), concat: (dim, receive) })
}

/// Moves the sharding of a global tensor from `concat_dim` to `split_dim`: each rank holds all of `split_dim` and its
/// part of `concat_dim` before, and the other way round after.
///
/// `split_sizes` are the ranks' parts of `split_dim` after, `concat_sizes` those of `concat_dim` before; `None` means
/// equal parts. Every rank calls. Backward is the transpose back.
///
/// # Errors
///
/// Sizes or dims that do not fit, the same dim twice; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{threads, transpose};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::ones([5, [3, 4][group.rank()]], (Kind::Float, Device::Cpu));
///     let y = transpose(&x, 0, Some(&[2, 3]), 1, Some(&[3, 4]), &group).unwrap();
///     assert_eq!(y.size(), [[2, 3][group.rank()], 7]);
/// });
/// ```
pub fn transpose(
    tensor: &Tensor,
    split_dim: i64,
    split_sizes: Option<&[i64]>,
    concat_dim: i64,
    concat_sizes: Option<&[i64]>,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        let work = start::transpose(tensor, split_dim, split_sizes, concat_dim, concat_sizes, group)?;
        return work.wait().map(|y| keep(tensor, y));
    }
    let split = match split_sizes {
        Some(sizes) => sizes.to_vec(),
        None => equal_parts("transpose", extent(tensor, split_dim), group)?,
    };
    let concat = concat_sizes.map_or_else(|| vec![extent(tensor, concat_dim); group.size()], <[i64]>::to_vec);
    run(
        tensor,
        maps::AllToAll { group: group.clone(), split: (split_dim, split), concat: (concat_dim, concat) },
    )
}

/// Sends rank q the rows along `dim` that `indices[q]` names, and joins what comes, in rank order.
///
/// `sizes[r][q]` is the number of rows that rank r sends to rank q, the same table on all ranks; `indices[q]` are
/// `Int64` of length `sizes[rank][q]`. A row may go to several ranks, or several times to one.
///
/// Every rank calls. Backward sends the gradients back and adds them up row by row (scatter-add), in fp32 for 16-bit
/// floats where `use_fp32` says so.
///
/// # Errors
///
/// Tables, indices or a dim that do not fit; the errors of the exchange.
pub fn indexed_all_to_all_v(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    use_fp32: bool,
    dim: i64,
    group: &Group,
) -> Result<Tensor> {
    if !records(tensor) {
        return start::indexed_all_to_all_v(tensor, indices, sizes, dim, group)?.wait();
    }
    let rows = maps::Rows {
        group: group.clone(),
        // Copies, since backward must use what forward did.
        indices: indices.iter().map(kept).collect::<Result<_>>()?,
        sizes: sizes.to_vec(),
        extent: extent(tensor, dim),
        dim,
        use_fp32,
    };
    run(tensor, maps::IndexedAllToAll(Arc::new(Mutex::new(rows))))
}

/// The adjoint of [`indexed_all_to_all_v`], as a function of its own: rank q's rows, in rank order of where they go, are
/// added up in zeros of extent `extent` along `dim`, at the places that `indices[q]` names on the rank that gets them.
///
/// `sizes[r][q]` is the number of rows that rank r gets from rank q, and `indices[q]` the places of those on this rank.
///
/// Every rank calls. Backward is [`indexed_all_to_all_v`].
///
/// # Errors
///
/// As [`indexed_all_to_all_v`].
pub fn indexed_scatter_add_v(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    extent: i64,
    dim: i64,
    use_fp32: bool,
    group: &Group,
) -> Result<Tensor> {
    if !records(tensor) {
        return start::indexed_scatter_add_v(tensor, indices, sizes, extent, dim, use_fp32, group)?.wait();
    }
    let rows = maps::Rows {
        group: group.clone(),
        indices: indices.iter().map(kept).collect::<Result<_>>()?,
        sizes: sizes.to_vec(),
        extent,
        dim,
        use_fp32,
    };
    run(tensor, maps::IndexedScatterAdd(Arc::new(Mutex::new(rows))))
}

/// Combines the ranks' tensors, element by element, on every rank: the same bits everywhere. All have the same shape.
/// 16-bit floats are combined in fp32.
///
/// Every rank calls. Sum and mean are differentiable and their own adjoints: for P ranks that go on alike, the gradient
/// is P-fold (for a value that counts once, see [`reduce_from_parallel_region`](crate::reduce_from_parallel_region)).
///
/// # Errors
///
/// A kind that has no such reduction; a gradient asked for through minimum, maximum or product; the errors of the
/// exchange.
pub fn all_reduce(tensor: &Tensor, op: ReduceOp, group: &Group) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start::all_reduce(tensor, op, group)?.wait().map(|y| keep(tensor, y));
    }
    let average = linear(op, "all_reduce", group)?;
    run(tensor, maps::AllReduce { group: group.clone(), average, use_fp32: true })
}

/// The tensor of rank `root`, on every rank. The others' have the same shape and kind, and require a gradient where it
/// does; their values do not matter.
///
/// Every rank calls, and every rank calls backward, which is [`reduce`] with sum; the gradient on the other ranks is
/// zeros.
///
/// # Errors
///
/// A root that is not in the group; the errors of the exchange.
pub fn broadcast(tensor: &Tensor, root: usize, group: &Group) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start::broadcast(tensor, root, group)?.wait().map(|y| keep(tensor, y));
    }
    run(tensor, maps::Broadcast { group: group.clone(), root, shape: tensor.size(), from_empty: false })
}

/// Combines the ranks' tensors, element by element, at rank `dst`. The others get an empty tensor of shape `[0]`,
/// attached to the graph. 16-bit floats are combined in fp32.
///
/// Every rank calls, and every rank calls backward, which is [`broadcast`]. Sum and mean are differentiable.
///
/// # Errors
///
/// A destination that is not in the group; a kind that has no such reduction; a gradient asked for through minimum,
/// maximum or product; the errors of the exchange.
pub fn reduce(tensor: &Tensor, op: ReduceOp, dst: usize, group: &Group) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start::reduce(tensor, op, dst, group)?.wait().map(|y| keep(tensor, y));
    }
    let average = linear(op, "reduce", group)?;
    let shape = tensor.size();
    run(tensor, maps::Reduce { group: group.clone(), root: dst, average, shape, to_empty: true })
}

/// Sends `tensor` to `dst` and receives a tensor of `shape` (and of the same kind) from `src`, where they are given:
/// what a pair, a shift or a ring of ranks calls. Without a source the result has the shape `[0]`. The tensors of both
/// sides require a gradient, or neither does: a receiver that sends nothing gives an empty one that does.
///
/// The ranks that take part call; so they do for backward, which sends the gradients the other way.
///
/// # Errors
///
/// A peer that is this rank or not in the group; a message of another length; the errors of the exchange.
pub fn send_recv(
    tensor: &Tensor,
    dst: Option<usize>,
    src: Option<usize>,
    shape: &[i64],
    group: &Group,
) -> Result<Tensor> {
    let received = if src.is_some() { shape.to_vec() } else { vec![0] };
    run(tensor, maps::SendReceive { group: group.clone(), dst, src, sent: tensor.size(), received })
}

/// A copy that later changes of the tensor do not reach.
fn kept(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.detach().f_to_device_(tensor.device(), tensor.kind(), false, true)?)
}

fn run(tensor: &Tensor, map: impl LinearMap) -> Result<Tensor> {
    differentiable(Arc::new(map), tensor)
}

/// On a group of one, the tensor with its history; else the result.
fn keep(tensor: &Tensor, result: Tensor) -> Tensor {
    match records(tensor) {
        true => tensor.shallow_clone(),
        false => result,
    }
}

/// Returns whether `op` divides by the number of ranks; an error if `op` is not linear.
fn linear(op: ReduceOp, operation: &'static str, group: &Group) -> Result<bool> {
    match op {
        ReduceOp::Sum => Ok(false),
        ReduceOp::Avg => Ok(true),
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => Err(group
            .call(operation)
            .refuse(format!("{op:?} has no gradient; detach the tensor, or use Sum or Avg"))),
    }
}

/// Equal parts of `extent`. It is no operation of its own unless it fails: a rank that refuses then speaks of the one
/// that the others wait in.
fn equal_parts(operation: &'static str, extent: i64, group: &Group) -> Result<Vec<i64>> {
    let ranks = group.size() as i64;
    match extent % ranks {
        0 => Ok(vec![extent / ranks; group.size()]),
        _ => group.call(operation).parts(None, extent),
    }
}

/// The extent along `dim`, or 0 where there is no such dim: the collective then refuses it.
pub(crate) fn extent(tensor: &Tensor, dim: i64) -> i64 {
    let dims = tensor.dim() as i64;
    let dim = if dim < 0 { dim + dims } else { dim };
    usize::try_from(dim).ok().and_then(|d| tensor.size().get(d).copied()).unwrap_or(0)
}

/// A map whose value is there already.
struct Computed {
    value: Mutex<Option<Tensor>>,
    map: Arc<dyn LinearMap>,
}

impl LinearMap for Computed {
    fn name(&self) -> &'static str {
        self.map.name()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let value = self.value.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        value.map_or_else(|| self.map.forward(x), Ok)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        self.map.adjoint()
    }
}
