//! The gloo group.

use std::ffi::{CString, c_int};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use isobar_rendezvous::TcpStore;
use tch::Tensor;

use super::{bridge, milliseconds, text};
use crate::error::{Error, Result, call, drop_box};
use crate::ffi::{self, RawError};

/// Options by which a rank reaches its peers.
#[derive(Debug, Clone)]
pub struct GlooOptions {
    /// Timeout of collectives, and of each wait while the ranks connect. gloo waits up to five times as long for the connection to
    /// a rank: bound the call of [`Gloo::new`] where that is too long. A send or receive has no timeout but that of
    /// [`Work::wait`].
    pub timeout: Duration,
    /// The network interface to use (`eth0`).
    pub interface: Option<String>,
    /// The name or address of this machine to use, where no interface is given. Without either, the machine's own
    /// name is looked up.
    pub host: Option<String>,
}

impl GlooOptions {
    /// Options with an address of this machine.
    pub fn host(host: &str, timeout: Duration) -> Self {
        Self { timeout, interface: None, host: Some(host.to_owned()) }
    }
}

/// Reductions of [`Gloo::all_reduce`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum ReduceOp {
    /// Their sum.
    Sum = 0,
    /// Their product.
    Product = 1,
    /// The smallest.
    Min = 2,
    /// The largest.
    Max = 3,
}

/// A rank's part of a gloo group: it moves contiguous CPU tensors between ranks over TCP.
///
/// All ranks start the same collectives in the same order. Operations run on the group's own threads; the tensors
/// must stay untouched until the [`Work`] is done. After an error or timeout of an operation the connections are
/// broken, and the group is of no more use.
#[derive(Debug)]
pub struct Gloo {
    // A lock, since starting an operation counts it without one.
    group: Mutex<Handle>,
    rank: usize,
    size: usize,
}

#[derive(Debug)]
struct Handle(*mut ffi::Gloo);

// SAFETY: torch's group is bound to no thread.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the group is ours, and not used after this; it waits for its threads.
        unsafe { ffi::isobar_gloo_free(self.0) };
    }
}

impl Gloo {
    /// Connects `size` ranks, of which this is `rank`. All of them call, with the same store and a `prefix` that no
    /// other group in the store has. The store is kept alive.
    ///
    /// # Errors
    ///
    /// If a rank is missing at the timeout, or there is no such interface or host.
    pub fn new(
        store: &TcpStore,
        prefix: &str,
        rank: usize,
        size: usize,
        options: &GlooOptions,
    ) -> Result<Self> {
        if rank >= size {
            return Err(Error::Argument(format!("rank {rank} is not within a group of {size}")));
        }
        let prefix = text("prefix", prefix)?;
        let interface = options.interface.as_deref().map(|name| text("interface", name)).transpose()?;
        let host = options.host.as_deref().map(|name| text("host", name)).transpose()?;
        let [interface, host] = [&interface, &host].map(|name| optional(name.as_ref()));
        let [rank_number, size_number] = [number("rank", rank)?, number("size", size)?];
        let boxed = Box::into_raw(Box::new(store.clone())).cast();
        let (timeout, prefix) = (milliseconds(options.timeout), prefix.as_ptr());
        // SAFETY: the shim owns the store in every case, and the texts are C strings or null during the call.
        let group = call(|error| unsafe {
            let (drop, ask) = (drop_box::<TcpStore>, bridge::ask);
            let (rank, size) = (rank_number, size_number);
            ffi::isobar_gloo_new(boxed, drop, ask, prefix, rank, size, timeout, interface, host, error)
        })?;
        Ok(Self { group: Mutex::new(Handle(group)), rank, size })
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Sends `tensor`'s bytes to a rank, which calls [`recv`](Self::recv) with the same tag and number of bytes.
    /// Operations of equal tag between two ranks match in their order.
    ///
    /// # Errors
    ///
    /// If `tensor` is not contiguous or not on the CPU, or the connection is broken.
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u32) -> Result<Work> {
        let [peer, tag] = self.peer_and_tag(to, tag)?;
        // SAFETY: the group and the tensor live during the call; the work keeps the memory alive.
        self.start(|group, error| unsafe { ffi::isobar_gloo_send(group, tensor.as_ptr(), peer, tag, error) })
    }

    /// Receives a rank's bytes into `tensor`.
    ///
    /// # Errors
    ///
    /// See [`send`](Self::send).
    pub fn recv(&self, tensor: &Tensor, from: usize, tag: u32) -> Result<Work> {
        let [peer, tag] = self.peer_and_tag(from, tag)?;
        // SAFETY: the group and the tensor live during the call; the work keeps the memory alive.
        self.start(|group, error| unsafe { ffi::isobar_gloo_recv(group, tensor.as_ptr(), peer, tag, error) })
    }

    /// Sends a part of `input` to each rank and receives a part of `output` from each. The parts follow each other
    /// along dim 0, and the counts are their extents along it: for tensors of bytes with one dim, bytes.
    ///
    /// # Errors
    ///
    /// If a tensor is not contiguous or not on the CPU, or the counts don't add up to its extent.
    pub fn all_to_all(
        &self,
        output: &Tensor,
        input: &Tensor,
        output_counts: &[i64],
        input_counts: &[i64],
    ) -> Result<Work> {
        self.check_counts("output", output, output_counts)?;
        self.check_counts("input", input, input_counts)?;
        // SAFETY: the group and the tensors live during the call; the work keeps the memory alive.
        self.start(|group, error| unsafe {
            let [output, input] = [output.as_ptr(), input.as_ptr()];
            let [output_counts, input_counts] = [output_counts.as_ptr(), input_counts.as_ptr()];
            ffi::isobar_gloo_all_to_all(group, output, input, output_counts, input_counts, self.size, error)
        })
    }

    /// Replaces `tensor` on each rank by the reduction over all ranks.
    ///
    /// # Errors
    ///
    /// If the tensor is not contiguous or not on the CPU. That gloo cannot reduce its dtype (int16, complex, bool) is
    /// an error of the work.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        // SAFETY: the group and the tensor live during the call; the work keeps the memory alive.
        self.start(|group, error| unsafe {
            ffi::isobar_gloo_all_reduce(group, tensor.as_ptr(), op as c_int, error)
        })
    }

    /// Is done when all ranks have started it and their earlier collectives are done.
    ///
    /// # Errors
    ///
    /// If the connections are broken.
    pub fn barrier(&self) -> Result<Work> {
        // SAFETY: the group lives during the call.
        self.start(|group, error| unsafe { ffi::isobar_gloo_barrier(group, error) })
    }

    fn start(
        &self,
        operation: impl FnOnce(*const ffi::Gloo, *mut RawError) -> *mut ffi::Work,
    ) -> Result<Work> {
        /// c10d notes every start in one map of the process, without a lock (pytorch/pytorch#179449): two groups on two
        /// threads would corrupt it.
        static STARTS: Mutex<()> = Mutex::new(());
        let _alone = STARTS.lock().unwrap_or_else(PoisonError::into_inner);
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Work { work: call(|error| operation(group.0, error))? })
    }

    fn check_counts(&self, which: &str, tensor: &Tensor, counts: &[i64]) -> Result<()> {
        let (size, shape) = (self.size, tensor.size());
        let total = counts.iter().try_fold(0i64, |sum, &count| sum.checked_add(count).filter(|_| count >= 0));
        if counts.len() == size && total.is_some() && total.as_ref() == shape.first() {
            return Ok(());
        }
        Err(Error::Argument(format!(
            "the {which} of shape {shape:?} needs {size} counts, one a rank, that add up to its first extent; got {counts:?}"
        )))
    }

    fn peer_and_tag(&self, peer: usize, tag: u32) -> Result<[c_int; 2]> {
        if peer >= self.size || peer == self.rank {
            let (rank, size) = (self.rank, self.size);
            return Err(Error::Argument(format!("rank {peer} is no peer of rank {rank} of {size}")));
        }
        Ok([number("rank", peer)?, number("tag", tag)?])
    }
}

/// An operation of a [`Gloo`] group under way; it keeps its tensors alive. Wait for it, or [`abandon`](Self::abandon) it:
/// dropping a send or receive that is not done breaks the connection.
#[derive(Debug)]
#[must_use = "an operation is done only when waited for"]
pub struct Work {
    work: *mut ffi::Work,
}

// SAFETY: the work's own threads share its state under locks; the handle is bound to no thread.
unsafe impl Send for Work {}

impl Work {
    /// Returns whether the operation has completed or failed; [`wait`](Self::wait) tells which. Does not block.
    ///
    /// # Errors
    ///
    /// If a helping thread cannot be started.
    pub fn is_completed(&mut self) -> Result<bool> {
        // SAFETY: the work lives, and `&mut` keeps others away.
        call(|error| unsafe { ffi::isobar_work_is_completed(self.work, error) })
    }

    /// Waits for the end of the operation.
    ///
    /// # Errors
    ///
    /// If it failed, or is not done at the timeout (then the group is broken).
    pub fn wait(&mut self, timeout: Duration) -> Result<()> {
        // SAFETY: the work lives, and `&mut` keeps others away.
        call(|error| unsafe { ffi::isobar_work_wait(self.work, milliseconds(timeout), error) })
    }

    /// Leaves the operation to gloo, for one that the other rank may never join. The connection stays in order: a late message is
    /// received, and forgotten. The operation and its tensor are never freed, unless it was seen to be done.
    pub fn abandon(self) {
        let work = std::mem::ManuallyDrop::new(self);
        // SAFETY: the shim owns the work from here on. If its thread cannot be told, the thread waits on, which harms nobody.
        let _ = call(|error| unsafe { ffi::isobar_work_abandon(work.work, error) });
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: the work is ours, and not used after this.
        unsafe { ffi::isobar_work_free(self.work) };
    }
}

fn optional(text: Option<&CString>) -> *const std::ffi::c_char {
    text.map_or(std::ptr::null(), |text| text.as_ptr())
}

fn number<T: TryInto<c_int> + Copy + std::fmt::Display>(what: &str, value: T) -> Result<c_int> {
    value.try_into().map_err(|_| Error::Argument(format!("{what} {value} is out of range")))
}
