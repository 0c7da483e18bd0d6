//! NCCL, for CUDA tensors: a communicator of its own for each group that asks for one, beside the backend that carries
//! host memory. The library is loaded at run time; a machine without it can do all but [`attach`].
//!
//! Work goes to a stream of the communicator's own: it waits for what the caller's stream has in its queue, and the
//! caller's stream waits for it.
#![expect(unsafe_code, reason = "calls NCCL on the memory of tensors; each block says why it is sound")]

use std::ffi::c_int;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};

use cudarc::nccl::{result, sys};
use isobar_torch::cuda::{self, Event, Stream, StreamGuard};
use tch::{Device, Kind, Tensor};

use super::{Failure, Request};
use crate::check::ReduceOp;
use crate::error::{Error, Result};
use crate::exchange::{self, nbytes};
use crate::group::{Call, Group};
use crate::work::Work;

/// Returns whether NCCL and a GPU are available in this process.
pub fn is_available() -> bool {
    // SAFETY: tries to load the library, which has no effect but that.
    cuda::is_available() && unsafe { sys::is_culib_present() }
}

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
        (true, 0) => result::get_uniqueid().ok().map(|id| id.internal.map(|byte| byte as u8).to_vec()),
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
    let mut unique = sys::ncclUniqueId { internal: [0; 128] };
    for (to, from) in unique.internal.iter_mut().zip(&bytes) {
        *to = *from as _;
    }
    let (rank, size) = (group.rank() as c_int, group.size() as c_int);
    // Off this thread, since the call waits for all ranks without a deadline.
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("isobar-nccl".to_owned());
    let spawned = thread.spawn(move || {
        let made = Stream::from_pool(device, true).map_err(|error| error.to_string()).and_then(|stream| {
            let _on_device = StreamGuard::new(&stream).map_err(|error| error.to_string())?;
            let mut handle = std::ptr::null_mut();
            // SAFETY: the handle is written by the call; the device is current.
            unsafe { result::comm_init_rank(&mut handle, size, unique, rank) }
                .map_err(|error| format!("{:?}", error.0))?;
            Ok(DeviceCommunicator { handle: Mutex::new(Handle(handle)), stream })
        });
        // If the receiver is gone, the communicator is dropped here.
        drop(sender.send(made));
    });
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

/// A group's communicator.
pub(crate) struct DeviceCommunicator {
    handle: Mutex<Handle>,
    stream: Stream,
}

struct Handle(sys::ncclComm_t);

// SAFETY: a communicator is bound to no thread; the mutex around it keeps calls apart.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the communicator is ours, and not used after this. Aborting does not wait for other ranks.
        let _ = unsafe { result::comm_abort(self.0) };
    }
}

impl DeviceCommunicator {
    /// Sends and receives with other ranks of the group; all tensors are contiguous, on the communicator's device.
    pub(crate) fn start(
        &self,
        sends: Vec<(usize, Tensor)>,
        receives: Vec<(usize, Tensor)>,
    ) -> Result<Box<dyn Request>, Failure> {
        let tensors = sends.iter().chain(&receives).map(|(_, tensor)| tensor.shallow_clone()).collect();
        self.run(tensors, |comm, stream| {
            result::group_start()?;
            for (peer, tensor) in &receives {
                let (memory, count) = (tensor.data_ptr(), nbytes(tensor));
                // SAFETY: the tensor is contiguous on the device, and kept for the stream until the work is done.
                unsafe {
                    result::recv(memory, count, sys::ncclDataType_t::ncclUint8, *peer as c_int, comm, stream)?
                };
            }
            for (peer, tensor) in &sends {
                let (memory, count) = (tensor.data_ptr(), nbytes(tensor));
                // SAFETY: as above.
                unsafe {
                    result::send(memory, count, sys::ncclDataType_t::ncclUint8, *peer as c_int, comm, stream)?
                };
            }
            result::group_end()
        })
    }

    /// Runs `launch` on the communicator's stream, after what the caller's stream holds now. Whoever waits for the request
    /// may use the results on any stream.
    fn run(
        &self,
        tensors: Vec<Tensor>,
        launch: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> Result<result::NcclStatus, result::NcclError>,
    ) -> Result<Box<dyn Request>, Failure> {
        let failed = |error: isobar_torch::Error| Failure(error.to_string());
        let caller = Stream::current(self.stream.device()).map_err(failed)?;
        let inputs = Event::new(false).map_err(failed)?;
        inputs.record(&caller).map_err(failed)?;
        inputs.block(&self.stream).map_err(failed)?;
        for tensor in &tensors {
            cuda::record_stream(tensor, &self.stream).map_err(failed)?;
        }
        let comm = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = self.stream.handle().map_err(failed)?.cast();
        launch(comm.0, stream).map_err(|error| Failure(format!("{:?}", error.0)))?;
        let done = Event::new(false).map_err(failed)?;
        done.record(&self.stream).map_err(failed)?;
        Ok(Box::new(Pending { done, comm: Borrowed(comm.0), _tensors: tensors }))
    }
}

/// The sum, mean, smallest, largest or product by NCCL's own reduction, where the group has a communicator, the tensor
/// is on its device, and NCCL reduces its kind in the precision that this crate promises.
pub(crate) fn all_reduce(call: &Call, tensor: &Tensor, op: ReduceOp) -> Option<Result<Work<Tensor>>> {
    let communicator = call.group().device_communicator()?;
    let kind = match tensor.kind() {
        Kind::Float => sys::ncclDataType_t::ncclFloat32,
        Kind::Double => sys::ncclDataType_t::ncclFloat64,
        Kind::Int => sys::ncclDataType_t::ncclInt32,
        Kind::Int64 => sys::ncclDataType_t::ncclInt64,
        Kind::Int8 => sys::ncclDataType_t::ncclInt8,
        Kind::Uint8 => sys::ncclDataType_t::ncclUint8,
        _ => return None,
    };
    let op = match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Avg => sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Product => sys::ncclRedOp_t::ncclProd,
    };
    matches!(tensor.device(), Device::Cuda(_)).then(|| {
        let input = exchange::plain(tensor)?.f_contiguous()?;
        let output = input.f_empty_like()?;
        let tensors = vec![input.shallow_clone(), output.shallow_clone()];
        let request = communicator.run(tensors, |comm, stream| {
            let (from, to) = (input.data_ptr().cast_const(), output.data_ptr());
            // SAFETY: both are contiguous on the device, of equal length and kind, and kept until the work is done.
            unsafe { result::all_reduce(from, to, input.numel(), kind, op, comm, stream) }
        });
        let request = request.map_err(|failure| call.broken(failure.0))?;
        call.count(nbytes(&output), nbytes(&output));
        let waited = exchange::complete(call.clone(), request);
        Ok(Work::start(call.clone(), async move {
            waited.await?;
            Ok(output)
        }))
    })
}

struct Pending {
    done: Event,
    comm: Borrowed,
    _tensors: Vec<Tensor>,
}

/// A communicator that the group keeps: groups outlive their works.
struct Borrowed(sys::ncclComm_t);

// SAFETY: as for `Handle`; only asked for its state.
unsafe impl Send for Borrowed {}

impl Request for Pending {
    fn poll(&mut self) -> Result<bool, Failure> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the work's call keeps the group, and so the communicator; the call writes one value.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.comm.0, &mut state) };
        for code in [asked, state] {
            if code != sys::ncclResult_t::ncclSuccess && code != sys::ncclResult_t::ncclInProgress {
                return Err(Failure(format!("{code:?}")));
            }
        }
        self.done.query().map_err(|error| Failure(error.to_string()))
    }
}

/// Returns the communicator of a device tensor that can be sent directly between devices.
pub(crate) fn communicator_for<'a>(call: &'a Call, tensor: &Tensor) -> Option<&'a DeviceCommunicator> {
    match tensor.device() {
        Device::Cuda(_) => call.group().device_communicator(),
        _ => None,
    }
}
