//! `all_to_all_v` and `transpose`; the adjoint of each is another call of the same collective.

use std::sync::Arc;

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use crate::collective::arguments::{equal_parts, extent};
use crate::collective::linear::{LinearMap, keep, records, run};
use crate::collective::parts::{done, others};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::sizes::offsets;

/// Sends rank q the part of extent `send_sizes[q]` along `dim`, and joins what comes from the ranks, `receive_sizes[r]`
/// from rank r, along the same dim in rank order. `None` means equal parts, sent and received.
///
/// Every rank calls; what q receives from r is what r sends to q. Backward is the same with the sizes exchanged.
///
/// # Errors
///
/// Sizes or dim that do not fit; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{all_to_all_v, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     // Rank 0 sends one element to itself and two to rank 1; rank 1 sends one to each.
///     let (x, send, receive) = match group.rank() {
///         0 => (Tensor::from_slice(&[1.0, 2.0, 3.0]), [1, 2], [1, 1]),
///         _ => (Tensor::from_slice(&[4.0, 5.0]), [1, 1], [2, 1]),
///     };
///     let y = all_to_all_v(&x, Some(&send), Some(&receive), 0, &group).unwrap();
///     let want: &[f64] = [&[1.0, 4.0][..], &[2.0, 3.0, 5.0]][group.rank()];
///     assert_eq!(y, Tensor::from_slice(want));
/// });
/// ```
pub fn all_to_all_v(
    tensor: &Tensor,
    send_sizes: Option<&[i64]>,
    receive_sizes: Option<&[i64]>,
    dim: i64,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        let work = start(tensor, send_sizes, receive_sizes, dim, group)?;
        return work.wait().map(|y| keep(tensor, y));
    }
    let send = match send_sizes {
        Some(sizes) => sizes.to_vec(),
        None => equal_parts("all_to_all_v", extent(tensor, dim), group)?,
    };
    let receive = match receive_sizes {
        Some(sizes) => sizes.to_vec(),
        None => vec![send.get(group.rank()).copied().unwrap_or(0); group.size()],
    };
    run(tensor, AllToAll { group: group.clone(), split: (dim, send), concat: (dim, receive) })
}

/// Moves the sharding of a global tensor from `concat_dim` to `split_dim`: each rank holds all of `split_dim` and its
/// part of `concat_dim` before, and the other way round after.
///
/// `split_sizes` are the ranks' parts of `split_dim` after, `concat_sizes` those of `concat_dim` before; `None` means
/// equal parts. Every rank calls. Backward is the transpose back.
///
/// # Errors
///
/// Sizes or dims that do not fit, the same dim twice; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{threads, transpose};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::ones([5, [3, 4][group.rank()]], (Kind::Float, Device::Cpu));
///     let y = transpose(&x, 0, Some(&[2, 3]), 1, Some(&[3, 4]), &group).unwrap();
///     assert_eq!(y.size(), [[2, 3][group.rank()], 7]);
/// });
/// ```
pub fn transpose(
    tensor: &Tensor,
    split_dim: i64,
    split_sizes: Option<&[i64]>,
    concat_dim: i64,
    concat_sizes: Option<&[i64]>,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        let work = start_transpose(tensor, split_dim, split_sizes, concat_dim, concat_sizes, group)?;
        return work.wait().map(|y| keep(tensor, y));
    }
    let split = match split_sizes {
        Some(sizes) => sizes.to_vec(),
        None => equal_parts("transpose", extent(tensor, split_dim), group)?,
    };
    let concat = concat_sizes.map_or_else(|| vec![extent(tensor, concat_dim); group.size()], <[i64]>::to_vec);
    run(tensor, AllToAll { group: group.clone(), split: (split_dim, split), concat: (concat_dim, concat) })
}

/// See [`all_to_all_v`](crate::all_to_all_v).
///
/// # Errors
///
/// Those of that function.
pub fn start(
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
/// Those of that function.
pub fn start_transpose(
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

/// Exchanges parts cut along one dim and joined along another, or the same.
struct AllToAll {
    group: Group,
    split: (i64, Vec<i64>),
    concat: (i64, Vec<i64>),
}

impl LinearMap for AllToAll {
    fn name(&self) -> &'static str {
        if self.split.0 == self.concat.0 { "all_to_all_v" } else { "transpose" }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Self { group, split: (split_dim, split), concat: (concat_dim, concat) } = self;
        match split_dim == concat_dim {
            true => start(x, Some(split), Some(concat), *split_dim, group)?.wait(),
            false => start_transpose(x, *split_dim, Some(split), *concat_dim, Some(concat), group)?.wait(),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, split, concat } = self;
        Arc::new(AllToAll { group: group.clone(), split: concat.clone(), concat: split.clone() })
    }
}
