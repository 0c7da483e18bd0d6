//! One rank's tensor to all.

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use super::{Form, SMALL, done, others};
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::sizes::{balanced, offsets};

/// See [`broadcast`](crate::broadcast).
///
/// # Errors
///
/// As there.
pub fn broadcast(tensor: &Tensor, root: usize, group: &Group) -> Result<Work<Tensor>> {
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
