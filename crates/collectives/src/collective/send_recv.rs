//! `send_recv`, whose adjoint is the exchange in the other direction; and one-sided `send` and `recv`.

use std::sync::Arc;

use tch::Tensor;

use crate::collective::linear::{LinearMap, run};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::{Direction, Group};
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory;

/// Sends `tensor` to `dst` and receives a tensor of `shape` (and of the same dtype) from `src`, where they are given:
/// what a pair, a shift or a ring of ranks calls. Without a source the result has the shape `[0]`. The tensors of both
/// sides require a gradient, or neither does: a receiver that sends nothing gives an empty one that does.
///
/// The ranks that take part call; so they do for backward, which sends the gradients the other way.
///
/// # Errors
///
/// A peer that is this rank or not in the group; a message of another length; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{send_recv, threads};
/// use tch::Tensor;
///
/// threads::run(3, std::time::Duration::from_secs(30), |group| {
///     // A ring: each rank sends to the next one.
///     let (rank, ranks) = (group.rank(), group.size());
///     let x = Tensor::from_slice(&[rank as f64]);
///     let before = (rank + ranks - 1) % ranks;
///     let y = send_recv(&x, Some((rank + 1) % ranks), Some(before), &[1], &group).unwrap();
///     assert_eq!(y, Tensor::from_slice(&[before as f64]));
/// });
/// ```
pub fn send_recv(
    tensor: &Tensor,
    dst: Option<usize>,
    src: Option<usize>,
    shape: &[i64],
    group: &Group,
) -> Result<Tensor> {
    let received = if src.is_some() { shape.to_vec() } else { vec![0] };
    run(tensor, SendReceive { group: group.clone(), dst, src, sent: tensor.size(), received })
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
    call.describe(tensor);
    let mut exchange = Exchange::new(&call, 0);
    exchange.send(dst, &tensor.f_contiguous()?, 0)?;
    let pending = exchange.start()?;
    Ok(Work::start(call, pending))
}

/// Receives what rank `src` sends with [`send`], into a tensor of the shape, dtype and device of `like`.
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

/// Sends to one rank and receives from another between devices, in one NCCL group. A device runs messages in order, so ranks that all
/// send first would deadlock.
fn exchange_on_device(
    tensor: &Tensor,
    dst: usize,
    like: &Tensor,
    src: usize,
    group: &Group,
) -> Result<Tensor> {
    let sending = group.pair_call("send", dst, Direction::To);
    check_peer(&sending, "the destination", dst)?;
    sending.defined(tensor)?;
    sending.describe(tensor);
    let exchanged = || -> Result<()> {
        let receiving = group.pair_call("recv", src, Direction::From);
        check_peer(&receiving, "the source", src)?;
        receiving.describe(like);
        let mut exchange = Exchange::new(&receiving, 0);
        exchange.send(dst, &tensor.f_contiguous()?, 0)?;
        exchange.receive(src, like, 0)?;
        let pending = exchange.start()?;
        Work::start(receiving, pending).wait()
    };
    let result = exchanged();
    sending.ended(result.as_ref().err());
    result.map(|()| like.shallow_clone())
}

/// A message to one rank and one from another, where there are such.
struct SendReceive {
    group: Group,
    dst: Option<usize>,
    src: Option<usize>,
    sent: Vec<i64>,
    received: Vec<i64>,
}

impl LinearMap for SendReceive {
    fn name(&self) -> &'static str {
        "send_recv"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if let (Some(dst), Some(src)) = (self.dst, self.src)
            && self.group.device_communicator().is_some()
            && x.device().is_cuda()
        {
            let output = memory::empty(&self.received, x.kind(), x.device())?;
            return exchange_on_device(x, dst, &output, src, &self.group);
        }
        let out = match self.dst {
            Some(dst) => Some(send(x, dst, &self.group)?),
            None => None,
        };
        let received = match self.src {
            Some(src) => {
                let like = memory::empty(&self.received, x.kind(), x.device())?;
                recv(&like, src, &self.group)?.wait()?
            }
            None => memory::empty(&[0], x.kind(), x.device())?,
        };
        if let Some(out) = out {
            out.wait()?;
        }
        // Seen as an adjoint: a rank that sent nothing has the gradient zero.
        match (self.src, self.received.as_slice()) {
            (None, [0]) | (Some(_), _) => Ok(received),
            (None, shape) => Ok(Tensor::f_zeros(shape, (x.kind(), x.device()))?),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, dst, src, sent, received } = self;
        Arc::new(SendReceive {
            group: group.clone(),
            dst: *src,
            src: *dst,
            sent: received.clone(),
            received: sent.clone(),
        })
    }
}
