//! `gather_v` and its adjoint, `scatter_v`.

use std::sync::{Arc, Mutex};

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use crate::collective::arguments::extent;
use crate::collective::linear::{Computed, LinearMap, keep, records, run};
use crate::collective::parts::{done, gather, others, with_extent};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::sizes::offsets;

/// Gathers parts of different extents along `dim` at rank `dst`, in rank order. The other ranks get a tensor of
/// extent 0 along `dim`, attached to the graph.
///
/// `sizes` as in [`all_gather_v`](crate::all_gather_v). Every rank calls, and every rank calls backward, which is [`scatter_v`] from `dst`.
///
/// # Errors
///
/// Sizes, dim, extents or a destination that do not fit; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{gather_v, threads};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::zeros([[2, 3][group.rank()], 4], (Kind::Float, Device::Cpu));
///     let all = gather_v(&x, Some(&[2, 3]), 0, 0, &group).unwrap();
///     assert_eq!(all.size(), [[5, 0][group.rank()], 4]);
/// });
/// ```
pub fn gather_v(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    dst: usize,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start(tensor, sizes, dim, dst, group)?.wait().map(|y| keep(tensor, y));
    }
    let sizes = sizes.map_or_else(|| vec![extent(tensor, dim); group.size()], <[i64]>::to_vec);
    run(tensor, Gather { group: group.clone(), sizes, dim, root: dst, elsewhere: None })
}

/// Hands the parts along `dim` of rank `src`'s tensor out, `sizes[r]` of them to rank r; `None` means equal parts.
///
/// On the other ranks, `tensor` gives the dtype, the device, the extents of the other dims and whether it requires a gradient, all
/// as on rank `src`; its extent along `dim` and its values do not matter. Every rank calls, and every rank calls backward, which
/// is [`gather_v`] to `src`; the gradient on the other ranks is zeros.
///
/// # Errors
///
/// Sizes, dim, extents or a source that do not fit; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{scatter_v, threads};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     // Only rank 0 has the values.
///     let x = match group.rank() {
///         0 => Tensor::from_slice(&[1.0, 2.0, 3.0]),
///         _ => Tensor::zeros([0], (Kind::Double, Device::Cpu)),
///     };
///     let part = scatter_v(&x, Some(&[1, 2]), 0, 0, &group).unwrap();
///     let want: &[f64] = [&[1.0][..], &[2.0, 3.0]][group.rank()];
///     assert_eq!(part, Tensor::from_slice(want));
/// });
/// ```
pub fn scatter_v(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    src: usize,
    group: &Group,
) -> Result<Tensor> {
    let part = if group.size() == 1 || !records(tensor) || sizes.is_none() {
        let part = start_scatter(tensor, sizes, dim, src, group)?.wait()?;
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
    let map = Scatter { group: group.clone(), sizes, dim, root: src, input: Some(tensor.size()) };
    match part {
        Some(part) => run(tensor, Computed { value: Mutex::new(Some(part)), map: Arc::new(map) }),
        None => run(tensor, map),
    }
}

/// See [`gather_v`](crate::gather_v).
///
/// # Errors
///
/// Those of that function.
pub fn start(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    dst: usize,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("gather_v");
    let dim = call.dim(tensor, dim)?;
    call.member("the destination", dst)?;
    let sizes = call.sizes(sizes, tensor.size()[dim])?;
    call.own_extent(tensor, dim, &sizes)?;
    let at_dst: Vec<bool> = (0..group.size()).map(|r| r == dst).collect();
    gather(call, tensor, sizes, dim, &at_dst)
}

/// See [`scatter_v`](crate::scatter_v).
///
/// # Errors
///
/// Those of that function.
pub fn start_scatter(
    tensor: &Tensor,
    sizes: Option<&[i64]>,
    dim: i64,
    src: usize,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("scatter_v");
    let dim = call.dim(tensor, dim)?;
    call.member("the source", src)?;
    let rank = group.rank();
    let sizes = match sizes {
        Some(given) if rank != src => call.sizes(Some(given), 0)?,
        None if rank != src => return equal_scatter_receiver(call, tensor, dim, src),
        given => {
            let sizes = call.parts(given, tensor.size()[dim])?;
            if given.is_none() {
                return equal_scatter_source(call, tensor, dim, sizes);
            }
            sizes
        }
    };
    scatter(call, tensor, sizes, dim, src, 0)
}

fn scatter(
    call: Call,
    tensor: &Tensor,
    sizes: Vec<i64>,
    dim: usize,
    src: usize,
    step: u8,
) -> Result<Work<Tensor>> {
    let (rank, ranks) = (call.group().rank(), call.group().size());
    if ranks == 1 {
        return Ok(done(call, tensor));
    }
    let _guard = NoGrad::new();
    let output = output_like(tensor, &with_extent(tensor, dim, sizes[rank]))?;
    let mut exchange = Exchange::new(&call, step);
    let starts = offsets(&sizes);
    if rank == src {
        for peer in others(rank, ranks) {
            exchange.send(peer, &tensor.f_narrow(dim as i64, starts[peer], sizes[peer])?, dim)?;
        }
    } else {
        exchange.receive(src, &output, dim)?;
    }
    let pending = exchange.start()?;
    if rank == src {
        memory::copy(&output, &tensor.f_narrow(dim as i64, starts[rank], sizes[rank])?)?;
    }
    Ok(Work::start(call, async move {
        pending.await?;
        Ok(output)
    }))
}

/// Without sizes only the source knows the extent: it says it first.
fn equal_scatter_source(call: Call, tensor: &Tensor, dim: usize, sizes: Vec<i64>) -> Result<Work<Tensor>> {
    let (rank, ranks) = (call.group().rank(), call.group().size());
    let size = Tensor::f_from_slice(&[sizes[rank]])?;
    let mut exchange = Exchange::new(&call, 0);
    for peer in others(rank, ranks) {
        exchange.send(peer, &size, 0)?;
    }
    let said = exchange.start()?;
    let parts = scatter(call.clone(), tensor, sizes, dim, rank, 1)?;
    Ok(parts.after(said))
}

fn equal_scatter_receiver(call: Call, tensor: &Tensor, dim: usize, src: usize) -> Result<Work<Tensor>> {
    let size = Tensor::f_from_slice(&[0_i64])?;
    let mut exchange = Exchange::new(&call, 0);
    exchange.receive(src, &size, 0)?;
    let heard = exchange.start()?;
    let tensor = tensor.detach();
    Ok(Work::start(call.clone(), async move {
        heard.await?;
        let (output, pending) = {
            let extent = size.f_int64_value(&[0])?;
            let output = output_like(&tensor, &with_extent(&tensor, dim, extent))?;
            let mut exchange = Exchange::new(&call, 1);
            exchange.receive(src, &output, dim)?;
            (output, exchange.start()?)
        };
        pending.await?;
        Ok(output)
    }))
}

/// Gathers parts along `dim` at one rank. What the others get has the shape `elsewhere` (zeros), or else the extent 0.
struct Gather {
    group: Group,
    sizes: Vec<i64>,
    dim: i64,
    root: usize,
    elsewhere: Option<Vec<i64>>,
}

impl LinearMap for Gather {
    fn name(&self) -> &'static str {
        "gather_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gathered = start(x, Some(&self.sizes), self.dim, self.root, &self.group)?.wait()?;
        match &self.elsewhere {
            Some(shape) if self.group.rank() != self.root => {
                Ok(Tensor::f_zeros(shape, (x.kind(), x.device()))?)
            }
            _ => Ok(gathered),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, root, .. } = self;
        let elsewhere = self.elsewhere.clone();
        Arc::new(Scatter {
            group: group.clone(),
            sizes: sizes.clone(),
            dim: *dim,
            root: *root,
            input: elsewhere,
        })
    }
}

/// Hands the parts along `dim` of one rank's tensor out. `input` is the shape that the other ranks' tensors have, where
/// it is not the extent 0.
struct Scatter {
    group: Group,
    sizes: Vec<i64>,
    dim: i64,
    root: usize,
    input: Option<Vec<i64>>,
}

impl LinearMap for Scatter {
    fn name(&self) -> &'static str {
        "scatter_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        start_scatter(x, Some(&self.sizes), self.dim, self.root, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, root, .. } = self;
        let input = self.input.clone();
        Arc::new(Gather {
            group: group.clone(),
            sizes: sizes.clone(),
            dim: *dim,
            root: *root,
            elsewhere: input,
        })
    }
}
