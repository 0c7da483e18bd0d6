//! `broadcast` and its adjoint, `reduce`.

use std::sync::Arc;

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use crate::collective::arguments::averages;
use crate::collective::linear::{LinearMap, Scaled, keep, records, run};
use crate::collective::parts::{Form, SMALL, done, others, send_parts};
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::reduce::{ReduceOp, combine};
use crate::local::sizes::{balanced, offsets};

/// Broadcasts the tensor of rank `root` to every rank. The other ranks pass a tensor of equal shape and dtype, which requires a
/// gradient if the root's does; its values are ignored.
///
/// Every rank calls, and every rank calls backward, which is [`reduce`] with sum; the gradient on the other ranks is
/// zeros.
///
/// # Errors
///
/// A root that is not in the group; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{broadcast, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[group.rank() as f64 + 5.0]);
///     assert_eq!(broadcast(&x, 1, &group).unwrap(), Tensor::from_slice(&[6.0]));
/// });
/// ```
pub fn broadcast(tensor: &Tensor, root: usize, group: &Group) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start(tensor, root, group)?.wait().map(|y| keep(tensor, y));
    }
    run(tensor, Broadcast { group: group.clone(), root, shape: tensor.size(), from_empty: false })
}

/// Combines the ranks' tensors, element by element, at rank `dst`. The others get an empty tensor of shape `[0]`,
/// attached to the graph. 16-bit floats are combined in fp32.
///
/// Every rank calls, and every rank calls backward, which is [`broadcast`]. Sum and mean are differentiable.
///
/// # Errors
///
/// A destination that is not in the group; a dtype that has no such reduction; a gradient asked for through minimum,
/// maximum or product; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{ReduceOp, reduce, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[group.rank() as f64, 7.0]);
///     let greatest = reduce(&x, ReduceOp::Max, 0, &group).unwrap();
///     match group.rank() {
///         0 => assert_eq!(greatest, Tensor::from_slice(&[1.0, 7.0])),
///         _ => assert_eq!(greatest.size(), [0]),
///     }
/// });
/// ```
pub fn reduce(tensor: &Tensor, op: ReduceOp, dst: usize, group: &Group) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start_reduce(tensor, op, dst, group)?.wait().map(|y| keep(tensor, y));
    }
    let average = averages(op, "reduce", group)?;
    let shape = tensor.size();
    run(tensor, Reduce { group: group.clone(), root: dst, average, shape, to_empty: true })
}

/// See [`broadcast`](crate::broadcast).
///
/// # Errors
///
/// Those of that function.
pub fn start(tensor: &Tensor, root: usize, group: &Group) -> Result<Work<Tensor>> {
    let call = group.call("broadcast");
    call.defined(tensor)?;
    call.describe(tensor);
    call.member("the root", root)?;
    if group.size() == 1 {
        return Ok(done(call, tensor));
    }
    let _guard = NoGrad::new();
    let (rank, ranks) = (group.rank(), group.size());
    let whole = if rank == root {
        tensor.detach().f_contiguous()?
    } else {
        memory::empty(&tensor.size(), tensor.kind(), tensor.device())?
    };
    let form = Form::of(tensor);
    let tensor = tensor.detach();
    // The root's result is as much its own as the others' are.
    let result = move |received: &Tensor| match rank == root {
        true => {
            let copy = output_like(&tensor, &tensor.size())?;
            memory::copy(&copy, &tensor)?;
            Ok(copy)
        }
        false => form.give(received),
    };
    let mut exchange = Exchange::new(&call, 0);
    if ranks == 2 || memory::nbytes(&whole) <= SMALL {
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
/// Those of that function.
pub fn start_reduce(tensor: &Tensor, op: ReduceOp, dst: usize, group: &Group) -> Result<Work<Tensor>> {
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

/// The tensor of one rank, on all. The other ranks' have the same shape.
struct Broadcast {
    group: Group,
    root: usize,
    shape: Vec<i64>,
    /// True if the other ranks' tensors are empty, like the results of `reduce`.
    from_empty: bool,
}

impl LinearMap for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = match self.from_empty && self.group.rank() != self.root {
            true => memory::empty(&self.shape, x.kind(), x.device())?,
            false => x.shallow_clone(),
        };
        start(&x, self.root, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, root, shape, from_empty } = self;
        let shape = shape.clone();
        Arc::new(Reduce { group: group.clone(), root: *root, average: false, shape, to_empty: *from_empty })
    }
}

/// The sum or mean of what all ranks hold, at one; zeros, or nothing, at the others.
struct Reduce {
    group: Group,
    root: usize,
    average: bool,
    shape: Vec<i64>,
    to_empty: bool,
}

impl LinearMap for Reduce {
    fn name(&self) -> &'static str {
        "reduce"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let op = if self.average { ReduceOp::Avg } else { ReduceOp::Sum };
        let reduced = start_reduce(x, op, self.root, &self.group)?.wait()?;
        match self.group.rank() != self.root && !self.to_empty {
            true => Ok(x.f_zeros_like()?),
            false => Ok(reduced),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, root, shape, average, to_empty } = self;
        let broadcast =
            Broadcast { group: group.clone(), root: *root, shape: shape.clone(), from_empty: *to_empty };
        match average {
            true => Arc::new(Scaled { by: 1.0 / group.size() as f64, map: Arc::new(broadcast) }),
            false => Arc::new(broadcast),
        }
    }
}
