//! Streams, events, pinned memory.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use tch::{Kind, Tensor};

use super::load::{require, require_any};
use crate::element::scalar_type;
use crate::error::{Result, call};
use crate::ffi;

/// A queue of work of a GPU. Work of one stream runs in order; work of several at once. A plain name for one of
/// torch's streams, which live as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream {
    id: i64,
    device: c_int,
}

impl Stream {
    /// The stream that the calling thread's operations on this device go to.
    ///
    /// # Errors
    ///
    /// If there is no such device.
    pub fn current(device: usize) -> Result<Self> {
        let device = require(device)?;
        // SAFETY: asks torch for a number.
        let id = call(|error| unsafe { ffi::isobar_cuda_current_stream(device, error) })?;
        Ok(Self { id, device })
    }

    /// Another stream, the next of torch's 32 of each priority.
    ///
    /// # Errors
    ///
    /// If there is no such device.
    pub fn from_pool(device: usize, high_priority: bool) -> Result<Self> {
        let device = require(device)?;
        // SAFETY: asks torch for a number.
        let id = call(|error| unsafe { ffi::isobar_cuda_stream_from_pool(device, high_priority, error) })?;
        Ok(Self { id, device })
    }

    /// The device that the stream belongs to.
    pub fn device(&self) -> usize {
        self.device.unsigned_abs() as usize
    }

    /// The `cudaStream_t`, for libraries that take one.
    ///
    /// # Errors
    ///
    /// If CUDA reports an earlier failure.
    pub fn handle(&self) -> Result<*mut c_void> {
        // SAFETY: the stream exists, as all streams of torch do.
        call(|error| unsafe { ffi::isobar_cuda_stream_handle(self.id, self.device, error) })
    }

    /// Returns whether all its work is done.
    ///
    /// # Errors
    ///
    /// If CUDA reports an earlier failure.
    pub fn query(&self) -> Result<bool> {
        // SAFETY: as in `handle`.
        call(|error| unsafe { ffi::isobar_cuda_stream_query(self.id, self.device, error) })
    }

    /// Blocks the thread until all its work is done.
    ///
    /// # Errors
    ///
    /// If CUDA reports an earlier failure.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: as in `handle`.
        call(|error| unsafe { ffi::isobar_cuda_stream_synchronize(self.id, self.device, error) })
    }
}

/// Sends the calling thread's operations to a stream while it lives. Guards nest; drop them in reverse order.
#[derive(Debug)]
#[must_use = "the former stream is current again when the guard is dropped"]
pub struct StreamGuard {
    stream_before: i64,
    device: c_int,
    device_before: c_int,
    // The current stream belongs to the thread.
    _not_send: PhantomData<*const ()>,
}

impl StreamGuard {
    /// Makes the stream and its device current.
    ///
    /// # Errors
    ///
    /// If CUDA reports an earlier failure.
    pub fn new(stream: &Stream) -> Result<Self> {
        let mut device_before = 0;
        // SAFETY: the stream exists; the former device is written to our variable.
        let stream_before = call(|error| unsafe {
            ffi::isobar_cuda_enter_stream(stream.id, stream.device, &mut device_before, error)
        })?;
        Ok(Self { stream_before, device: stream.device, device_before, _not_send: PhantomData })
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        // A failure here is one that CUDA keeps reporting; the next call tells it.
        // SAFETY: both were current before.
        let _ = call(|error| unsafe {
            ffi::isobar_cuda_leave_stream(self.stream_before, self.device, self.device_before, error);
        });
    }
}

/// A mark in a stream's work, for others to wait for.
#[derive(Debug)]
pub struct Event {
    event: *mut ffi::Event,
}

// SAFETY: a CUDA event is bound to no thread. (It is not `Sync`: recording changes it without a lock.)
unsafe impl Send for Event {}

impl Event {
    /// A new event; with `timing`, one for [`elapsed_ms`](Self::elapsed_ms).
    ///
    /// # Errors
    ///
    /// If there is no CUDA.
    pub fn new(timing: bool) -> Result<Self> {
        require_any()?;
        // SAFETY: makes an object that we own.
        let event = call(|error| unsafe { ffi::isobar_cuda_event_new(timing, error) })?;
        Ok(Self { event })
    }

    /// Marks the end of the stream's work so far. An event stays with the device of its first stream.
    ///
    /// # Errors
    ///
    /// If the event was recorded on another device.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the event lives and, not being `Sync`, is used by this thread only.
        call(|error| unsafe { ffi::isobar_cuda_event_record(self.event, stream.id, stream.device, error) })
    }

    /// Lets later work of the stream wait for the mark; the thread does not wait. Without a mark nothing waits.
    ///
    /// # Errors
    ///
    /// If CUDA reports an earlier failure.
    pub fn block(&self, stream: &Stream) -> Result<()> {
        // SAFETY: as in `record`.
        call(|error| unsafe { ffi::isobar_cuda_event_block(self.event, stream.id, stream.device, error) })
    }

    /// Returns whether the work before the mark is done; `true` without a mark.
    ///
    /// # Errors
    ///
    /// If CUDA reports an earlier failure.
    pub fn query(&self) -> Result<bool> {
        // SAFETY: as in `record`.
        call(|error| unsafe { ffi::isobar_cuda_event_query(self.event, error) })
    }

    /// Blocks the thread until the work before the mark is done.
    ///
    /// # Errors
    ///
    /// If CUDA reports an earlier failure.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: as in `record`.
        call(|error| unsafe { ffi::isobar_cuda_event_synchronize(self.event, error) })
    }

    /// Milliseconds of GPU time from this mark to a later one, both made with timing and done.
    ///
    /// # Errors
    ///
    /// If one was made without timing, has no mark or is not done.
    pub fn elapsed_ms(&self, later: &Event) -> Result<f64> {
        // SAFETY: as in `record`.
        call(|error| unsafe { ffi::isobar_cuda_event_elapsed_ms(self.event, later.event, error) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is ours, and not used after this.
        unsafe { ffi::isobar_cuda_event_free(self.event) };
    }
}

/// Tells torch that a stream uses the tensor's memory, so that it is not given to others before that work is done.
///
/// # Errors
///
/// If there is no CUDA, or the tensor is not on the stream's device.
pub fn record_stream(tensor: &Tensor, stream: &Stream) -> Result<()> {
    // SAFETY: the tensor lives during the call, and the stream exists.
    call(|error| unsafe {
        ffi::isobar_cuda_record_stream(tensor.as_ptr(), stream.id, stream.device, error);
    })
}

/// An uninitialised CPU tensor in memory that a GPU copies from and to directly, and while the CPU goes on.
///
/// # Errors
///
/// If there is no CUDA, or memory is short.
pub fn pinned(shape: &[i64], kind: Kind) -> Result<Tensor> {
    require_any()?;
    // SAFETY: the shape is as long as said.
    let handle =
        call(|error| unsafe { ffi::isobar_pinned(shape.as_ptr(), shape.len(), scalar_type(kind), error) })?;
    // SAFETY: a fresh handle that we own; never null on success.
    Ok(unsafe { Tensor::from_ptr(handle) })
}
