//! The collectives, asynchronous and without gradients: each begins the operation and gives its [`Work`].
//!
//! The functions of the same names in the crate's root wait, and are differentiable; the meaning of the arguments is
//! told there. Every rank of the group calls, in the same order.
//!
//! ```
//! use isobar_collectives::{Group, ReduceOp, start};
//! use tch::Tensor;
//!
//! let group = Group::single();
//! let x = Tensor::from_slice(&[1.0, 2.0]);
//! let work = start::all_reduce(&x, ReduceOp::Sum, &group)?;
//! // compute something else here
//! let sum = work.wait()?;
//! assert_eq!(sum.size(), [2]);
//! # Ok::<(), isobar_collectives::Error>(())
//! ```

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use crate::check::ReduceOp;
use crate::error::Result;
use crate::exchange::{self, Exchange, is_channels_last, output_like};
use crate::group::{Call, Direction, Group};
use crate::reduce::{accumulator, combine};
use crate::rows;
use crate::sizes::{balanced, offsets};
use crate::work::Work;

pub use crate::fused::start as fused_all_reduce;

/// Below so many bytes a reduction sends everything to everybody, in one step; above, parts, in two.
const SMALL: usize = 16 << 10;

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
    Ok(Work::start(call.clone(), async move {
        pending.await?;
        let rank = call.group().rank();
        parts.insert(rank, own);
        // The sum goes where one of its first two terms was received, unless the output lies otherwise in memory.
        let received = &parts[usize::from(rank == 0)];
        let own = &parts[rank];
        let target = match accumulator(own.kind(), use_fp32) == own.kind() && !is_channels_last(own) {
            true => received.shallow_clone(),
            false => output_like(own, &own.size())?,
        };
        combine(&target, &parts, op, use_fp32)?;
        Ok(target)
    }))
}

/// See [`all_to_all_v`](crate::all_to_all_v).
///
/// # Errors
///
/// As there.
pub fn all_to_all_v(
    tensor: &Tensor,
    send_sizes: Option<&[i64]>,
    receive_sizes: Option<&[i64]>,
    dim: i64,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("all_to_all_v");
    let dim = call.dim(tensor, dim)?;
    let send_sizes = call.parts(send_sizes, tensor.size()[dim])?;
    let receive_sizes = call.sizes(receive_sizes, send_sizes[group.rank()])?;
    all_to_all(call, tensor, dim, send_sizes, dim, receive_sizes)
}

/// See [`transpose`](crate::transpose).
///
/// # Errors
///
/// As there.
pub fn transpose(
    tensor: &Tensor,
    split_dim: i64,
    split_sizes: Option<&[i64]>,
    concat_dim: i64,
    concat_sizes: Option<&[i64]>,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("transpose");
    let (split, concat) = (call.dim(tensor, split_dim)?, call.dim(tensor, concat_dim)?);
    if split == concat {
        return Err(call.refuse(format!("the dims to split and to join are both {split}; expected two dims")));
    }
    let split_sizes = call.parts(split_sizes, tensor.size()[split])?;
    let concat_sizes = call.sizes(concat_sizes, tensor.size()[concat])?;
    call.own_extent(tensor, concat, &concat_sizes)?;
    all_to_all(call, tensor, split, split_sizes, concat, concat_sizes)
}

/// See [`indexed_all_to_all_v`](crate::indexed_all_to_all_v).
///
/// # Errors
///
/// As there.
pub fn indexed_all_to_all_v(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    dim: i64,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("indexed_all_to_all_v");
    let dim = call.dim(tensor, dim)?;
    check_indices(&call, tensor.size()[dim], indices, sizes)?;
    let _guard = NoGrad::new();
    let (rank, ranks) = (group.rank(), group.size());
    let tensor = tensor.detach();
    let received: Vec<i64> = sizes.iter().map(|from| from[rank]).collect();
    let output = output_like(&tensor, &with_extent(&tensor, dim, received.iter().sum()))?;
    let starts = offsets(&received);
    let mut pending = Vec::with_capacity(ranks);
    for peer in others(rank, ranks) {
        let mut exchange = Exchange::new(&call, 0);
        exchange.receive(peer, &output.f_narrow(dim as i64, starts[peer], received[peer])?, dim)?;
        // Each peer's rows leave as soon as they are gathered.
        let picked = rows::select(&tensor, dim, &indices[peer])?;
        exchange.send(peer, &picked, dim)?;
        pending.push(Box::pin(exchange.start()?));
    }
    let own = output.f_narrow(dim as i64, starts[rank], received[rank])?;
    rows::select_into(&own, &tensor, dim, &indices[rank])?;
    Ok(Work::start(call, async move {
        all(pending).await?;
        Ok(output)
    }))
}

/// The adjoint of [`indexed_all_to_all_v`]: what each rank received goes back to where it came from, and is added up
/// there, into zeros of extent `extent` along `dim`.
///
/// # Errors
///
/// As there.
pub fn indexed_scatter_add_v(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    extent: i64,
    dim: i64,
    use_fp32: bool,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("indexed_scatter_add_v");
    let dim = call.dim(tensor, dim)?;
    check_indices(&call, extent, indices, sizes)?;
    let (rank, ranks) = (group.rank(), group.size());
    let received: Vec<i64> = sizes.iter().map(|from| from[rank]).collect();
    if tensor.size()[dim] != received.iter().sum::<i64>() {
        return Err(call.refuse(format!(
            "the tensor of shape {:?} has another extent along dim {dim} than the sizes {received:?} sum to",
            tensor.size()
        )));
    }
    let _guard = NoGrad::new();
    let tensor = tensor.detach();
    let starts = offsets(&received);
    let mut exchange = Exchange::new(&call, 0);
    let mut back = Vec::with_capacity(ranks);
    for peer in 0..ranks {
        let block = tensor.f_narrow(dim as i64, starts[peer], received[peer])?;
        if peer == rank {
            back.push(block);
            continue;
        }
        exchange.send(peer, &block, dim)?;
        let rows =
            exchange::empty(&with_extent(&tensor, dim, sizes[rank][peer]), tensor.kind(), tensor.device())?;
        exchange.receive(peer, &rows, dim)?;
        back.push(rows);
    }
    let pending = exchange.start()?;
    let indices: Vec<Tensor> = indices.iter().map(Tensor::shallow_clone).collect();
    let shape = with_extent(&tensor, dim, extent);
    Ok(Work::start(call, async move {
        pending.await?;
        rows::add_up(&shape, dim, &indices, &back, use_fp32)
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

/// The same as part of an operation that has begun.
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
    if let Some(work) = crate::backend::nccl::all_reduce(&call, tensor, op) {
        return work;
    }
    let _guard = NoGrad::new();
    let flat = tensor.detach().f_contiguous()?.f_view([-1])?;
    let form = Form::of(tensor);
    let output = exchange::empty(&flat.size(), flat.kind(), flat.device())?;
    if exchange::nbytes(&flat) <= SMALL {
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

/// See [`broadcast`](crate::broadcast).
///
/// # Errors
///
/// As there.
pub fn broadcast(tensor: &Tensor, root: usize, group: &Group) -> Result<Work<Tensor>> {
    let call = group.call("broadcast");
    call.defined(tensor)?;
    call.member("the root", root)?;
    if group.size() == 1 {
        return Ok(done(call, tensor));
    }
    let _guard = NoGrad::new();
    let (rank, ranks) = (group.rank(), group.size());
    let whole = if rank == root {
        tensor.detach().f_contiguous()?
    } else {
        exchange::empty(&tensor.size(), tensor.kind(), tensor.device())?
    };
    let form = Form::of(tensor);
    let tensor = tensor.detach();
    // The root's result is as much its own as the others' are.
    let result = move |received: &Tensor| match rank == root {
        true => {
            let copy = output_like(&tensor, &tensor.size())?;
            exchange::copy(&copy, &tensor)?;
            Ok(copy)
        }
        false => form.give(received),
    };
    let mut exchange = Exchange::new(&call, 0);
    if ranks == 2 || exchange::nbytes(&whole) <= SMALL {
        if rank == root {
            for peer in others(rank, ranks) {
                exchange.send(peer, &whole, 0)?;
            }
        } else {
            exchange.receive(root, &whole, 0)?;
        }
        let pending = exchange.start()?;
        return Ok(Work::start(call, async move {
            pending.await?;
            result(&whole)
        }));
    }
    // Scatter, then gather everywhere: the root sends the tensor about once, whatever the number of ranks.
    let flat = whole.f_view([-1])?;
    let sizes = balanced(flat.size()[0], ranks);
    let starts = offsets(&sizes);
    let part = |r: usize| flat.f_narrow(0, starts[r], sizes[r]);
    if rank == root {
        for peer in others(rank, ranks) {
            exchange.send(peer, &part(peer)?, 0)?;
        }
    } else {
        exchange.receive(root, &part(rank)?, 0)?;
    }
    let pending = exchange.start()?;
    let flat = flat.shallow_clone();
    Ok(Work::start(call.clone(), async move {
        pending.await?;
        let pending = {
            let part = |r: usize| flat.f_narrow(0, starts[r], sizes[r]);
            let mut exchange = Exchange::new(&call, 1);
            for peer in others(rank, ranks).filter(|&peer| peer != root) {
                exchange.send(peer, &part(rank)?, 0)?;
            }
            if rank != root {
                for peer in others(rank, ranks) {
                    exchange.receive(peer, &part(peer)?, 0)?;
                }
            }
            exchange.start()?
        };
        pending.await?;
        result(&whole)
    }))
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
    let nothing = exchange::empty(&[0], flat.kind(), flat.device())?;
    if exchange::nbytes(&flat) <= SMALL {
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
                false => exchange::empty(&[sizes[rank]], output.kind(), output.device())?,
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

/// Sends a tensor to one rank, which calls [`recv`]. Only the two call; messages between a pair of ranks arrive in the
/// order in which they are sent.
///
/// # Errors
///
/// A destination that is this rank or none of the group.
pub fn send(tensor: &Tensor, dst: usize, group: &Group) -> Result<Work<()>> {
    let call = group.pair_call("send", dst, Direction::To);
    check_peer(&call, "the destination", dst)?;
    call.defined(tensor)?;
    let mut exchange = Exchange::new(&call, 0);
    exchange.send(dst, &tensor.f_contiguous()?, 0)?;
    let pending = exchange.start()?;
    Ok(Work::start(call, pending))
}

/// Receives what rank `src` sends with [`send`], into a tensor of the shape, kind and device of `like`.
///
/// # Errors
///
/// A source that is this rank or none of the group; a message of another length.
pub fn recv(like: &Tensor, src: usize, group: &Group) -> Result<Work<Tensor>> {
    let call = group.pair_call("recv", src, Direction::From);
    check_peer(&call, "the source", src)?;
    call.defined(like)?;
    let output = exchange::empty(&like.size(), like.kind(), like.device())?;
    let mut exchange = Exchange::new(&call, 0);
    exchange.receive(src, &output, 0)?;
    let pending = exchange.start()?;
    Ok(Work::start(call, async move {
        pending.await?;
        Ok(output)
    }))
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
        exchange::copy(&output.f_narrow(dim as i64, starts[rank], sizes[rank])?, tensor)?;
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
        exchange::copy(&output, &tensor.f_narrow(dim as i64, starts[rank], sizes[rank])?)?;
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

fn all_to_all(
    call: Call,
    tensor: &Tensor,
    split_dim: usize,
    split_sizes: Vec<i64>,
    concat_dim: usize,
    concat_sizes: Vec<i64>,
) -> Result<Work<Tensor>> {
    let (rank, ranks) = (call.group().rank(), call.group().size());
    if ranks == 1 {
        return Ok(done(call, tensor));
    }
    let _guard = NoGrad::new();
    let tensor = tensor.detach();
    let mut shape = tensor.size();
    shape[split_dim] = split_sizes[rank];
    shape[concat_dim] = concat_sizes.iter().sum();
    let output = output_like(&tensor, &shape)?;
    let (from, to) = (offsets(&split_sizes), offsets(&concat_sizes));
    let row_dim = split_dim.max(concat_dim);
    let cut = |peer: usize| tensor.f_narrow(split_dim as i64, from[peer], split_sizes[peer]);
    let place = |peer: usize| output.f_narrow(concat_dim as i64, to[peer], concat_sizes[peer]);
    let (own, target) = (cut(rank)?, place(rank)?);
    if own.size() != target.size() {
        return Err(call.refuse(format!(
            "this rank sends itself a block of shape {:?} and expects one of {:?}",
            own.size(),
            target.size()
        )));
    }
    let mut exchange = Exchange::new(&call, 0);
    for peer in others(rank, ranks) {
        exchange.receive(peer, &place(peer)?, row_dim)?;
        exchange.send(peer, &cut(peer)?, row_dim)?;
    }
    let pending = exchange.start()?;
    exchange::copy(&target, &own)?;
    Ok(Work::start(call, async move {
        pending.await?;
        Ok(output)
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
        let share = exchange::empty(&with_extent(&tensor, dim, sizes[rank]), tensor.kind(), tensor.device())?;
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

/// The other ranks, beginning after this one, so that not all send to the same at once.
fn others(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (1..ranks).map(move |i| (rank + i) % ranks)
}

/// On a group of one rank the result is the tensor itself.
fn done(call: Call, tensor: &Tensor) -> Work<Tensor> {
    let tensor = tensor.detach();
    Work::start(call, async move { Ok(tensor) })
}

/// The shape and the memory format that a result has, which travels in row-major order.
struct Form {
    shape: Vec<i64>,
    like: Option<Tensor>,
}

impl Form {
    fn of(tensor: &Tensor) -> Self {
        let like = exchange::is_channels_last(tensor).then(|| tensor.detach());
        Self { shape: tensor.size(), like }
    }

    fn give(&self, flat: &Tensor) -> Result<Tensor> {
        let plain = flat.f_view(self.shape.as_slice())?;
        let Some(like) = &self.like else { return Ok(plain) };
        let output = output_like(like, &self.shape)?;
        exchange::copy(&output, &plain)?;
        Ok(output)
    }
}

fn with_extent(tensor: &Tensor, dim: usize, extent: i64) -> Vec<i64> {
    let mut shape = tensor.size();
    shape[dim] = extent;
    shape
}

fn check_peer(call: &Call, what: &str, peer: usize) -> Result<()> {
    call.member(what, peer)?;
    match peer == call.group().rank() {
        true => Err(call.error(format!("{what} {peer} is this rank itself"))),
        false => Ok(()),
    }
}

fn check_indices(call: &Call, extent: i64, indices: &[Tensor], sizes: &[Vec<i64>]) -> Result<()> {
    let (rank, ranks) = (call.group().rank(), call.group().size());
    if indices.len() != ranks || sizes.len() != ranks || sizes.iter().any(|s| s.len() != ranks) {
        return Err(call.refuse(format!(
            "{} index tensors and {} lists of sizes were given; expected {ranks} of each, one a rank, and {ranks} \
             sizes in each list",
            indices.len(),
            sizes.len()
        )));
    }
    if sizes.iter().flatten().any(|&s| s < 0) {
        return Err(call.refuse(format!("the sizes {sizes:?} hold a negative one")));
    }
    for (peer, index) in indices.iter().enumerate() {
        call.defined(index)?;
        if index.dim() != 1 || index.size()[0] != sizes[rank][peer] || index.kind() != tch::Kind::Int64 {
            return Err(call.refuse(format!(
                "the indices for rank {peer} are {:?} of shape {:?}; expected Int64 of shape [{}], as the sizes say",
                index.kind(),
                index.size(),
                sizes[rank][peer]
            )));
        }
        if let Some(bad) = rows::out_of_range(index, extent)? {
            return Err(call.refuse(format!(
                "the indices for rank {peer} hold {bad}; expected 0 to {}, the extent being {extent}",
                extent - 1
            )));
        }
    }
    Ok(())
}

/// Ends when all of `exchanges` have. All of them move on at each poll: ranks that wait for one peer after the other wait
/// for each other in a ring.
async fn all(mut exchanges: Vec<Pin<Box<impl Future<Output = Result<()>>>>>) -> Result<()> {
    poll_fn(|context| {
        let mut at = 0;
        while let Some(exchange) = exchanges.get_mut(at) {
            match exchange.as_mut().poll(context) {
                Poll::Ready(Ok(())) => drop(exchanges.remove(at)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => at += 1,
            }
        }
        if exchanges.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
}
