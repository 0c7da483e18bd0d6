//! Parts to wholes and wholes to parts.

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use super::{done, others, with_extent};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::sizes::offsets;

/// See [`all_gather_v`](crate::all_gather_v).
///
/// # Errors
///
/// As there.
pub fn all_gather_v(tensor: &Tensor, sizes: Option<&[i64]>, dim: i64, group: &Group) -> Result<Work<Tensor>> {
    let call = group.call("all_gather_v");
    let dim = call.dim(tensor, dim)?;
    let sizes = call.sizes(sizes, tensor.size()[dim])?;
    call.own_extent(tensor, dim, &sizes)?;
    let everywhere = vec![true; group.size()];
    gather(call, tensor, sizes, dim, &everywhere)
}

/// See [`gather_v`](crate::gather_v).
///
/// # Errors
///
/// As there.
pub fn gather_v(
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
/// As there.
pub fn scatter_v(
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

fn gather(call: Call, tensor: &Tensor, sizes: Vec<i64>, dim: usize, to: &[bool]) -> Result<Work<Tensor>> {
    let (rank, ranks) = (call.group().rank(), call.group().size());
    if ranks == 1 {
        return Ok(done(call, tensor));
    }
    let _guard = NoGrad::new();
    let extent = if to[rank] { sizes.iter().sum() } else { 0 };
    let output = output_like(tensor, &with_extent(tensor, dim, extent))?;
    let starts = offsets(&sizes);
    let mut exchange = Exchange::new(&call, 0);
    for peer in others(rank, ranks) {
        if to[rank] {
            exchange.receive(peer, &output.f_narrow(dim as i64, starts[peer], sizes[peer])?, dim)?;
        }
        if to[peer] {
            exchange.send(peer, tensor, dim)?;
        }
    }
    let pending = exchange.start()?;
    if to[rank] {
        memory::copy(&output.f_narrow(dim as i64, starts[rank], sizes[rank])?, tensor)?;
    }
    Ok(Work::start(call, async move {
        pending.await?;
        Ok(output)
    }))
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
