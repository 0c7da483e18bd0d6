//! `all_gather_v` and its adjoint, `reduce_scatter_v`.

use std::sync::Arc;

use tch::Tensor;

use crate::collective::arguments::{averages, equal_parts, extent};
use crate::collective::linear::{LinearMap, Scaled, keep, records, run};
use crate::collective::parts::{done, gather, send_parts};
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{is_channels_last, output_like};
use crate::local::reduce::{ReduceOp, accumulator, combine};

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
        return start(tensor, sizes, dim, group)?.wait().map(|y| keep(tensor, y));
    }
    let sizes = sizes.map_or_else(|| vec![extent(tensor, dim); group.size()], <[i64]>::to_vec);
    run(tensor, AllGather { group: group.clone(), sizes, dim, use_fp32 })
}

/// Combines the ranks' tensors, element by element, and leaves rank r the part of extent `sizes[r]` along `dim`;
/// `None` means equal parts. All have the same shape. 16-bit floats are combined in fp32 where `use_fp32` says so.
///
/// Every rank calls. Sum and mean are differentiable; backward is [`all_gather_v`].
///
/// # Errors
///
/// Sizes or dim that do not fit; a dtype that has no such reduction; a gradient asked for through another operation
/// than sum and mean; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{ReduceOp, reduce_scatter_v, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[1.0, 2.0, 3.0]) * (group.rank() + 1) as f64;
///     let part = reduce_scatter_v(&x, Some(&[1, 2]), 0, ReduceOp::Sum, true, &group).unwrap();
///     let want: &[f64] = [&[3.0][..], &[6.0, 9.0]][group.rank()];
///     assert_eq!(part, Tensor::from_slice(want));
/// });
/// ```
pub fn reduce_scatter_v(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    op: ReduceOp,
    use_fp32: bool,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start_reduce_scatter(tensor, sizes, dim, op, use_fp32, group)?
            .wait()
            .map(|y| keep(tensor, y));
    }
    let average = averages(op, "reduce_scatter_v", group)?;
    let call_sizes = match sizes {
        Some(sizes) => sizes.to_vec(),
        None => equal_parts("reduce_scatter_v", extent(tensor, dim), group)?,
    };
    run(tensor, ReduceScatter { group: group.clone(), sizes: call_sizes, dim, average, use_fp32 })
}

/// See [`all_gather_v`](crate::all_gather_v).
///
/// # Errors
///
/// Those of that function.
pub fn start(tensor: &Tensor, sizes: Option<&[i64]>, dim: i64, group: &Group) -> Result<Work<Tensor>> {
    let call = group.call("all_gather_v");
    let dim = call.dim(tensor, dim)?;
    let sizes = call.sizes(sizes, tensor.size()[dim])?;
    call.own_extent(tensor, dim, &sizes)?;
    let everywhere = vec![true; group.size()];
    gather(call, tensor, sizes, dim, &everywhere)
}

/// See [`reduce_scatter_v`](crate::reduce_scatter_v).
///
/// # Errors
///
/// Those of that function.
pub fn start_reduce_scatter(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    op: ReduceOp,
    use_fp32: bool,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("reduce_scatter_v");
    let dim = call.dim(tensor, dim)?;
    call.reducible(op, tensor)?;
    let sizes = call.parts(sizes, tensor.size()[dim])?;
    if group.size() == 1 {
        return Ok(done(call, tensor));
    }
    let (exchange, mut parts, own) = send_parts(&call, tensor, &sizes, dim)?;
    let pending = exchange.start()?;
    let whole = tensor.detach();
    Ok(Work::start(call.clone(), async move {
        pending.await?;
        let rank = call.group().rank();
        parts.insert(rank, own);
        // The sum goes where one of its first two terms was received, unless the output lies otherwise in memory.
        let received = &parts[usize::from(rank == 0)];
        let own = &parts[rank];
        let target = match accumulator(own.kind(), use_fp32) == own.kind() && !is_channels_last(&whole) {
            true => received.shallow_clone(),
            false => output_like(&whole, &own.size())?,
        };
        combine(&target, &parts, op, use_fp32)?;
        Ok(target)
    }))
}

/// Gathers parts along `dim` everywhere.
struct AllGather {
    group: Group,
    sizes: Vec<i64>,
    dim: i64,
    use_fp32: bool,
}

impl LinearMap for AllGather {
    fn name(&self) -> &'static str {
        "all_gather_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        start(x, Some(&self.sizes), self.dim, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, use_fp32 } = self;
        Arc::new(ReduceScatter {
            group: group.clone(),
            sizes: sizes.clone(),
            dim: *dim,
            average: false,
            use_fp32: *use_fp32,
        })
    }
}

/// Adds up over ranks (or averages) and leaves each its part along `dim`.
struct ReduceScatter {
    group: Group,
    sizes: Vec<i64>,
    dim: i64,
    average: bool,
    use_fp32: bool,
}

impl LinearMap for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let op = if self.average { ReduceOp::Avg } else { ReduceOp::Sum };
        start_reduce_scatter(x, Some(&self.sizes), self.dim, op, self.use_fp32, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, average, use_fp32 } = self;
        let gather = AllGather { group: group.clone(), sizes: sizes.clone(), dim: *dim, use_fp32: *use_fp32 };
        match average {
            true => Arc::new(Scaled { by: 1.0 / group.size() as f64, map: Arc::new(gather) }),
            false => Arc::new(gather),
        }
    }
}
