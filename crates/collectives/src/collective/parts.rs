//! Steps that several collectives share.

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::sizes::offsets;

/// Below so many bytes a reduction sends everything to everybody, in one step; above, parts, in two.
pub(crate) const SMALL: usize = 16 << 10;

/// The other ranks, beginning after this one, so that not all send to the same at once.
pub(crate) fn others(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (1..ranks).map(move |i| (rank + i) % ranks)
}

/// On a group of one rank the result is the tensor itself.
pub(crate) fn done(call: Call, tensor: &Tensor) -> Work<Tensor> {
    let tensor = tensor.detach();
    Work::start(call, async move { Ok(tensor) })
}

/// The shape and the memory format that a result has, which travels in row-major order.
pub(crate) struct Form {
    shape: Vec<i64>,
    like: Option<Tensor>,
}

impl Form {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        let like = memory::is_channels_last(tensor).then(|| tensor.detach());
        Self { shape: tensor.size(), like }
    }

    pub(crate) fn give(&self, flat: &Tensor) -> Result<Tensor> {
        let plain = flat.f_view(self.shape.as_slice())?;
        let Some(like) = &self.like else { return Ok(plain) };
        let output = output_like(like, &self.shape)?;
        memory::copy(&output, &plain)?;
        Ok(output)
    }
}

pub(crate) fn with_extent(tensor: &Tensor, dim: usize, extent: i64) -> Vec<i64> {
    let mut shape = tensor.size();
    shape[dim] = extent;
    shape
}

pub(crate) fn gather(
    call: Call,
    tensor: &Tensor,
    sizes: Vec<i64>,
    dim: usize,
    to: &[bool],
) -> Result<Work<Tensor>> {
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

/// Sends each rank its part of `tensor`; receives everybody's share of this rank's part, in rank order without its own,
/// which comes last.
pub(crate) fn send_parts<'a>(
    call: &'a Call,
    tensor: &Tensor,
    sizes: &[i64],
    dim: usize,
) -> Result<(Exchange<'a>, Vec<Tensor>, Tensor)> {
    let _guard = NoGrad::new();
    let tensor = tensor.detach();
    let (rank, ranks) = (call.group().rank(), call.group().size());
    let starts = offsets(sizes);
    let mut exchange = Exchange::new(call, 0);
    let mut received = Vec::with_capacity(ranks);
    for peer in others(rank, ranks) {
        exchange.send(peer, &tensor.f_narrow(dim as i64, starts[peer], sizes[peer])?, dim)?;
    }
    for peer in (0..ranks).filter(|&peer| peer != rank) {
        let share = memory::empty(&with_extent(&tensor, dim, sizes[rank]), tensor.kind(), tensor.device())?;
        exchange.receive(peer, &share, dim)?;
        received.push(share);
    }
    Ok((exchange, received, tensor.f_narrow(dim as i64, starts[rank], sizes[rank])?))
}

/// Sends `tensor` to everybody; what all hold, in rank order.
pub(crate) fn everybody<'a>(call: &'a Call, tensor: &Tensor) -> Result<(Exchange<'a>, Vec<Tensor>)> {
    let (rank, ranks) = (call.group().rank(), call.group().size());
    let mut exchange = Exchange::new(call, 0);
    let mut all = Vec::with_capacity(ranks);
    for peer in 0..ranks {
        if peer == rank {
            all.push(tensor.shallow_clone());
            continue;
        }
        let theirs = tensor.f_empty_like()?;
        exchange.send(peer, tensor, 0)?;
        exchange.receive(peer, &theirs, 0)?;
        all.push(theirs);
    }
    Ok((exchange, all))
}
