//! Messages between two ranks.

use tch::Tensor;

use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::{Direction, Group};
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory;

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
    call.describe(tensor);
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
    call.describe(like);
    let output = memory::empty(&like.size(), like.kind(), like.device())?;
    let mut exchange = Exchange::new(&call, 0);
    exchange.receive(src, &output, 0)?;
    let pending = exchange.start()?;
    Ok(Work::start(call, async move {
        pending.await?;
        Ok(output)
    }))
}

fn check_peer(call: &Call, what: &str, peer: usize) -> Result<()> {
    call.member(what, peer)?;
    match peer == call.group().rank() {
        true => Err(call.error(format!("{what} {peer} is this rank itself"))),
        false => Ok(()),
    }
}
