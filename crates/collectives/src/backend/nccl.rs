//! NCCL's communicators, which carry CUDA tensors beside the backend that carries host memory. The library is loaded at run
//! time.
//!
//! Work goes to a stream of the communicator's own: it waits for what the caller's stream has in its queue, and the
//! caller's stream waits for it.
#![expect(unsafe_code, reason = "calls NCCL on the memory of tensors; each block says why it is sound")]

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use cudarc::nccl::{result, sys};
use isobar_torch::cuda::{self, Event, Stream, StreamGuard};
use tch::{Kind, Tensor};

use crate::local::memory::nbytes;
use crate::local::reduce::ReduceOp;
use crate::wire::{Failure, Request};

/// Returns whether NCCL and a GPU are available in this process.
pub fn is_available() -> bool {
    // SAFETY: tries to load the library, which has no effect but that.
    cuda::is_available() && unsafe { sys::is_culib_present() }
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

/// Returns a unique ID for a new communicator, to be given to all of its ranks; `None` if NCCL fails.
pub(crate) fn unique_id() -> Option<Vec<u8>> {
    result::get_uniqueid().ok().map(|id| id.internal.map(|byte| byte as u8).to_vec())
}

impl DeviceCommunicator {
    /// Connects the ranks that have the same `id`, each with a GPU of its own. Waits for all of them, without a deadline.
    pub(crate) fn connect(id: &[u8], rank: usize, size: usize, device: usize) -> Result<Self, String> {
        let mut unique = sys::ncclUniqueId { internal: [0; 128] };
        for (to, from) in unique.internal.iter_mut().zip(id) {
            *to = *from as _;
        }
        let stream = Stream::from_pool(device, true).map_err(|error| error.to_string())?;
        let on_device = StreamGuard::new(&stream).map_err(|error| error.to_string())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the handle is written by the call; the device is current.
        unsafe { result::comm_init_rank(&mut handle, size as c_int, unique, rank as c_int) }
            .map_err(|error| format!("{:?}", error.0))?;
        drop(on_device);
        Ok(Self { handle: Mutex::new(Handle(handle)), stream })
    }

    /// Returns whether NCCL reduces values of this dtype as this crate promises.
    pub(crate) fn reduces(&self, kind: Kind, op: ReduceOp) -> bool {
        keeps_promises(kind, op)
    }

    /// Number of this rank's GPU.
    pub(crate) fn device(&self) -> usize {
        self.stream.device()
    }

    /// Reduces `input` over the ranks into `output`; both are contiguous on the communicator's device, of one shape and dtype.
    pub(crate) fn all_reduce(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Box<dyn Request>, Failure> {
        let kind = input.kind();
        let data = data_type(kind).filter(|_| keeps_promises(kind, op));
        let data = data.ok_or_else(|| Failure(format!("NCCL does not reduce {kind:?} by {op:?}")))?;
        let op = match op {
            ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
            ReduceOp::Avg => sys::ncclRedOp_t::ncclAvg,
            ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
            ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
            ReduceOp::Product => sys::ncclRedOp_t::ncclProd,
        };
        self.run(vec![input.shallow_clone(), output.shallow_clone()], |comm, stream| {
            let (from, to) = (input.data_ptr().cast_const(), output.data_ptr());
            // SAFETY: both are contiguous on the device, of equal length and dtype, and kept until the work is done.
            unsafe { result::all_reduce(from, to, input.numel(), data, op, comm, stream) }
        })
    }

    /// Sends and receives with other ranks of the group; all tensors are contiguous, on the communicator's device.
    pub(crate) fn start(
        &self,
        sends: Vec<(usize, Tensor)>,
        receives: Vec<(usize, Tensor)>,
    ) -> Result<Box<dyn Request>, Failure> {
        let tensors = sends.iter().chain(&receives).map(|(_, tensor)| tensor.shallow_clone()).collect();
        self.run(tensors, |comm, stream| {
            result::group_start()?;
            let queued = queue(&sends, &receives, comm, stream);
            // After an error too: until the group ends, NCCL only queues later calls of this thread.
            let ended = result::group_end();
            queued.and(ended)
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

/// Queues sends and receives of a group of calls that has started.
fn queue(
    sends: &[(usize, Tensor)],
    receives: &[(usize, Tensor)],
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> Result<result::NcclStatus, result::NcclError> {
    let mut status = result::NcclStatus::Success;
    for (peer, tensor) in receives {
        let (memory, count) = (tensor.data_ptr(), nbytes(tensor));
        // SAFETY: the tensor is contiguous on the device, and kept for the stream until the work is done.
        status = unsafe {
            result::recv(memory, count, sys::ncclDataType_t::ncclUint8, *peer as c_int, comm, stream)?
        };
    }
    for (peer, tensor) in sends {
        let (memory, count) = (tensor.data_ptr(), nbytes(tensor));
        // SAFETY: as above.
        status = unsafe {
            result::send(memory, count, sys::ncclDataType_t::ncclUint8, *peer as c_int, comm, stream)?
        };
    }
    Ok(status)
}

/// Returns whether NCCL reduces values of this dtype in the precision that this crate promises. Extrema of floating dtypes are
/// excluded: NCCL's drop NaN, which this crate's propagate.
fn keeps_promises(kind: Kind, op: ReduceOp) -> bool {
    let is_extreme = matches!(op, ReduceOp::Min | ReduceOp::Max);
    data_type(kind).is_some() && !(is_extreme && matches!(kind, Kind::Float | Kind::Double))
}

/// Returns NCCL's data type for a dtype that it reduces in the precision that this crate promises.
fn data_type(kind: Kind) -> Option<sys::ncclDataType_t> {
    Some(match kind {
        Kind::Float => sys::ncclDataType_t::ncclFloat32,
        Kind::Double => sys::ncclDataType_t::ncclFloat64,
        Kind::Int => sys::ncclDataType_t::ncclInt32,
        Kind::Int64 => sys::ncclDataType_t::ncclInt64,
        Kind::Int8 => sys::ncclDataType_t::ncclInt8,
        Kind::Uint8 => sys::ncclDataType_t::ncclUint8,
        _ => return None,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extrema_of_floating_dtypes_are_not_left_to_nccl() {
        for kind in [Kind::Float, Kind::Double] {
            assert!(keeps_promises(kind, ReduceOp::Sum) && keeps_promises(kind, ReduceOp::Product));
            assert!(!keeps_promises(kind, ReduceOp::Max) && !keeps_promises(kind, ReduceOp::Min));
        }
        assert!(keeps_promises(Kind::Int64, ReduceOp::Max) && !keeps_promises(Kind::Half, ReduceOp::Sum));
    }
}
