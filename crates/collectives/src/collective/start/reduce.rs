//! Reductions: everybody's share of a part goes to one rank, which combines them in rank order.

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use super::{Form, SMALL, done, others, with_extent};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, is_channels_last, output_like};
use crate::local::reduce::{ReduceOp, accumulator, combine};
use crate::local::sizes::{balanced, offsets};

/// See [`reduce_scatter_v`](crate::reduce_scatter_v).
///
/// # Errors
///
/// As there.
pub fn reduce_scatter_v(
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

/// See [`all_reduce`](crate::all_reduce).
///
/// # Errors
///
/// As there.
pub fn all_reduce(tensor: &Tensor, op: ReduceOp, group: &Group) -> Result<Work<Tensor>> {
    all_reduce_in(tensor, op, true, group)
}

pub(crate) fn all_reduce_in(
    tensor: &Tensor,
    op: ReduceOp,
    use_fp32: bool,
    group: &Group,
) -> Result<Work<Tensor>> {
    all_reduce_as(group.call("all_reduce"), tensor, op, use_fp32)
}

/// Starts an all-reduce as part of an operation that has begun.
pub(crate) fn all_reduce_as(
    call: Call,
    tensor: &Tensor,
    op: ReduceOp,
    use_fp32: bool,
) -> Result<Work<Tensor>> {
    call.reducible(op, tensor)?;
    let (rank, ranks) = (call.group().rank(), call.group().size());
    if ranks == 1 {
        return Ok(done(call, tensor));
    }
    if let Some(work) = all_reduce_on_device(&call, tensor, op) {
        return work;
    }
    let _guard = NoGrad::new();
    let flat = tensor.detach().f_contiguous()?.f_view([-1])?;
    let form = Form::of(tensor);
    let output = memory::empty(&flat.size(), flat.kind(), flat.device())?;
    if memory::nbytes(&flat) <= SMALL {
        let (exchange, parts) = everybody(&call, &flat)?;
        let pending = exchange.start()?;
        return Ok(Work::start(call, async move {
            pending.await?;
            combine(&output, &parts, op, use_fp32)?;
            form.give(&output)
        }));
    }
    let sizes = balanced(flat.size()[0], ranks);
    let (exchange, mut parts, own) = send_parts(&call, &flat, &sizes, 0)?;
    let pending = exchange.start()?;
    Ok(Work::start(call.clone(), async move {
        pending.await?;
        parts.insert(rank, own);
        let starts = offsets(&sizes);
        let pending = {
            let mine = output.f_narrow(0, starts[rank], sizes[rank])?;
            combine(&mine, &parts, op, use_fp32)?;
            drop(parts);
            let mut exchange = Exchange::new(&call, 1);
            for peer in others(rank, ranks) {
                exchange.send(peer, &mine, 0)?;
                exchange.receive(peer, &output.f_narrow(0, starts[peer], sizes[peer])?, 0)?;
            }
            exchange.start()?
        };
        pending.await?;
        form.give(&output)
    }))
}

/// Reduces with NCCL, if the group has a communicator, the tensor is on its device, and NCCL reduces its dtype in the
/// precision that this crate promises.
fn all_reduce_on_device(call: &Call, tensor: &Tensor, op: ReduceOp) -> Option<Result<Work<Tensor>>> {
    let communicator = call.communicator_for(tensor)?;
    communicator.reduces(tensor.kind()).then(|| {
        let input = memory::plain(tensor)?.f_contiguous()?;
        let output = input.f_empty_like()?;
        let request =
            communicator.all_reduce(&input, &output, op).map_err(|failure| call.broken(failure.0))?;
        call.count(memory::nbytes(&output), memory::nbytes(&output));
        let waited = call.complete(request);
        Ok(Work::start(call.clone(), async move {
            waited.await?;
            Ok(output)
        }))
    })
}

/// See [`reduce`](crate::reduce).
///
/// # Errors
///
/// As there.
pub fn reduce(tensor: &Tensor, op: ReduceOp, dst: usize, group: &Group) -> Result<Work<Tensor>> {
    let call = group.call("reduce");
    call.member("the destination", dst)?;
    call.reducible(op, tensor)?;
    if group.size() == 1 {
        return Ok(done(call, tensor));
    }
    let _guard = NoGrad::new();
    let (rank, ranks) = (group.rank(), group.size());
    let flat = tensor.detach().f_contiguous()?.f_view([-1])?;
    let form = Form::of(tensor);
    let is_dst = rank == dst;
    let nothing = memory::empty(&[0], flat.kind(), flat.device())?;
    if memory::nbytes(&flat) <= SMALL {
        let mut exchange = Exchange::new(&call, 0);
        let mut parts = Vec::new();
        if is_dst {
            for peer in 0..ranks {
                let part = if peer == rank { flat.shallow_clone() } else { flat.f_empty_like()? };
                if peer != rank {
                    exchange.receive(peer, &part, 0)?;
                }
                parts.push(part);
            }
        } else {
            exchange.send(dst, &flat, 0)?;
        }
        let pending = exchange.start()?;
        return Ok(Work::start(call, async move {
            pending.await?;
            if !is_dst {
                return Ok(nothing);
            }
            let output = flat.f_empty_like()?;
            combine(&output, &parts, op, true)?;
            form.give(&output)
        }));
    }
    let sizes = balanced(flat.size()[0], ranks);
    let (exchange, mut parts, own) = send_parts(&call, &flat, &sizes, 0)?;
    let pending = exchange.start()?;
    let output = if is_dst { flat.f_empty_like()? } else { nothing };
    Ok(Work::start(call.clone(), async move {
        pending.await?;
        parts.insert(rank, own);
        let starts = offsets(&sizes);
        let pending = {
            let mine = match is_dst {
                true => output.f_narrow(0, starts[rank], sizes[rank])?,
                false => memory::empty(&[sizes[rank]], output.kind(), output.device())?,
            };
            combine(&mine, &parts, op, true)?;
            let mut exchange = Exchange::new(&call, 1);
            if is_dst {
                for peer in others(rank, ranks) {
                    exchange.receive(peer, &output.f_narrow(0, starts[peer], sizes[peer])?, 0)?;
                }
            } else {
                exchange.send(dst, &mine, 0)?;
            }
            exchange.start()?
        };
        pending.await?;
        if is_dst { form.give(&output) } else { Ok(output) }
    }))
}

/// Sends each rank its part of `tensor`; receives everybody's share of this rank's part, in rank order without its own,
/// which comes last.
fn send_parts<'a>(
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
fn everybody<'a>(call: &'a Call, tensor: &Tensor) -> Result<(Exchange<'a>, Vec<Tensor>)> {
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
