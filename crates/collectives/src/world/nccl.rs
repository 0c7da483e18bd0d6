//! NCCL, for CUDA tensors: a communicator of its own for each group that asks for one, beside the backend that carries
//! host memory. The library is loaded at run time; a machine without it can do all but [`attach`].
//!
//! Work goes to a stream of the communicator's own: it waits for what the caller's stream has in its queue, and the
//! caller's stream waits for it.

use std::sync::mpsc::{RecvTimeoutError, channel};

use crate::backend::nccl::{DeviceCommunicator, unique_id};
use crate::engine::group::Group;
use crate::error::{Error, Result};

pub use crate::backend::nccl::is_available;

/// Gives `group` an NCCL communicator over the ranks' GPUs, `device` being this rank's: from then on the group's
/// collectives take CUDA tensors without a detour over host memory. A group that has one keeps it.
///
/// Every rank of the group calls, each with a GPU of its own (NCCL takes no two ranks on one).
///
/// # Errors
///
/// On all ranks, where NCCL or the GPU is missing on one, two share a GPU, or the communicator is not there by the
/// deadline.
pub fn attach(group: &Group, device: usize) -> Result<()> {
    if group.device_communicator().is_some() {
        return Ok(());
    }
    let failed = |problem: String| Error::Start { backend: "nccl", problem };
    let id = match (is_available(), group.rank()) {
        (false, _) => None,
        (true, 0) => unique_id(),
        (true, _) => Some(Vec::new()),
    };
    let ready = group.all_gather_bytes(&[u8::from(id.is_some())])?;
    if let Some(rank) = ready.iter().position(|ready| *ready != [1]) {
        return Err(failed(format!(
            "rank {rank} of group \"{}\" has no GPU or no NCCL (libnccl.so must be where libraries are looked for)",
            group.name()
        )));
    }
    let bytes = group.broadcast_bytes(&id.unwrap_or_default(), 0)?;
    let (rank, size) = (group.rank(), group.size());
    // Off this thread, since the call waits for all ranks without a deadline.
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("isobar-nccl".to_owned());
    // If the receiver is gone, the communicator is dropped there.
    let spawned =
        thread.spawn(move || drop(sender.send(DeviceCommunicator::connect(&bytes, rank, size, device))));
    // The others learn of it below.
    let spawned =
        spawned.map_err(|error| failed(format!("cannot start a thread to connect the ranks: {error}")));
    let made = match spawned.map(|_| receiver.recv_timeout(group.deadline())) {
        Err(error) => Err(error),
        Ok(Ok(made)) => made.map_err(failed),
        Ok(Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected)) => {
            let lost = |problem: String| Error::LostAtStart { backend: "nccl", problem };
            Err(lost(format!("no communicator for group \"{}\" by the deadline", group.name())))
        }
    };
    // All use it, or none.
    let all = group.all_gather_bytes(&[u8::from(made.is_ok())]);
    let made = made?;
    if let Some(rank) = all?.iter().position(|ok| *ok != [1]) {
        return Err(failed(format!("rank {rank} of group \"{}\" got no communicator", group.name())));
    }
    // If another thread was faster, its communicator is kept.
    drop(group.set_device_communicator(made));
    Ok(())
}
