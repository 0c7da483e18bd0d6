//! Every rank's blocks to every rank.

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use super::{done, others};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::sizes::offsets;

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
    call.recorded.sizes(&send_sizes);
    call.recorded.receives(&receive_sizes);
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
    // All ranks cut, and join, by the same.
    call.recorded.sizes(&split_sizes);
    all_to_all(call, tensor, split, split_sizes, concat, concat_sizes)
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
    memory::copy(&target, &own)?;
    Ok(Work::start(call, async move {
        pending.await?;
        Ok(output)
    }))
}
