//! Small host data, whose length only its owner knows.

use tch::{Device, Kind, Tensor};

use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::work::Work;
use crate::error::Result;

/// Gathers the bytes of every rank: first their lengths, then the bytes.
pub(crate) fn all_gather(call: Call, bytes: &[u8]) -> Result<Work<Vec<Vec<u8>>>> {
    let mine = to_tensor(bytes)?;
    let length = to_tensor(&(bytes.len() as u64).to_le_bytes())?;
    Ok(Work::start(call.clone(), async move {
        let size = call.group().size();
        let lengths = everybody(&call, 0, length, vec![8; size]).await?;
        let lengths = lengths.iter().map(|t| Ok(length_of(&to_bytes(t)?))).collect::<Result<Vec<i64>>>()?;
        let all = everybody(&call, 1, mine, lengths).await?;
        all.iter().map(to_bytes).collect()
    }))
}

/// Broadcasts the bytes of `root`.
pub(crate) fn broadcast(call: Call, bytes: &[u8], root: usize) -> Result<Work<Vec<u8>>> {
    if root >= call.group().size() {
        return Err(call.refuse(format!("the root {root} is not a rank below {}", call.group().size())));
    }
    let is_root = call.group().rank() == root;
    let mine = to_tensor(if is_root { bytes } else { &[] })?;
    let length = to_tensor(&(bytes.len() as u64).to_le_bytes())?;
    Ok(Work::start(call.clone(), async move {
        let length = from_root(&call, 0, length, 8, root).await?;
        let length = length_of(&to_bytes(&length)?);
        to_bytes(&from_root(&call, 1, mine, length, root).await?)
    }))
}

async fn everybody(call: &Call, step: u8, mine: Tensor, lengths: Vec<i64>) -> Result<Vec<Tensor>> {
    let rank = call.group().rank();
    let mut exchange = Exchange::new(call, step);
    let mut all = Vec::with_capacity(lengths.len());
    for (peer, length) in lengths.into_iter().enumerate() {
        if peer == rank {
            all.push(mine.shallow_clone());
            continue;
        }
        let theirs = Tensor::f_empty([length], (Kind::Uint8, Device::Cpu))?;
        exchange.send(peer, &mine, 0)?;
        exchange.receive(peer, &theirs, 0)?;
        all.push(theirs);
    }
    exchange.start()?.await?;
    Ok(all)
}

async fn from_root(call: &Call, step: u8, mine: Tensor, length: i64, root: usize) -> Result<Tensor> {
    let (rank, size) = (call.group().rank(), call.group().size());
    let mut exchange = Exchange::new(call, step);
    let buffer = if rank == root {
        for peer in (0..size).filter(|&peer| peer != root) {
            exchange.send(peer, &mine, 0)?;
        }
        mine
    } else {
        let buffer = Tensor::f_empty([length], (Kind::Uint8, Device::Cpu))?;
        exchange.receive(root, &buffer, 0)?;
        buffer
    };
    exchange.start()?.await?;
    Ok(buffer)
}

fn to_tensor(bytes: &[u8]) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(bytes)?)
}

fn to_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; tensor.numel()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(bytes)
}

fn length_of(bytes: &[u8]) -> i64 {
    bytes.try_into().map_or(0, i64::from_le_bytes)
}
