//! MPI, through rsmpi's raw layer. Bytes travel, so that every kind of element does; messages longer than MPI's counts
//! are cut. All calls are nonblocking and polled, under one lock for the process, which is free between polls.
#![expect(unsafe_code, reason = "calls MPI on the memory of tensors; each block says why it is sound")]

use std::collections::VecDeque;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::local::memory::nbytes;
use crate::wire::{Backend, BackendKind, Carries, Failure, Notice, Request, Rows, Tag, Transfer};
use ::mpi::ffi;

/// Options of the MPI backend.
#[derive(Debug, Clone)]
pub struct Options {
    /// Timeout of a call.
    pub deadline: Duration,
    /// Messages longer than this are cut, in bytes; at most 2³¹ − 1.
    pub max_message: usize,
    /// Strided tensors travel row by row, without a copy, where a row has at least so many bytes.
    pub min_row: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(300), max_message: 1 << 30, min_row: 32 << 10 }
    }
}

/// Returns whether MPI is initialised in this process, and not finalised.
pub fn is_running() -> bool {
    let (mut begun, mut ended): (c_int, c_int) = (0, 0);
    // SAFETY: both calls may be made at any time, by any thread and beside any other call, and write one int.
    unsafe {
        ffi::MPI_Initialized(&mut begun);
        ffi::MPI_Finalized(&mut ended);
    }
    begun != 0 && ended == 0
}

/// Ends MPI, where it runs; all processes call, when no communication is under way. Nothing where a group has failed, or
/// where not all processes come within some seconds: then only [`abort`] ends the job for certain.
pub fn finalize() {
    if is_running() && !BROKEN.load(Ordering::Relaxed) && settle() {
        let _lock = lock();
        // SAFETY: MPI runs, and all requests of this crate are complete.
        unsafe { ffi::MPI_Finalize() };
    }
}

/// Ends all processes of the job with an exit code.
pub fn abort(code: i32) -> ! {
    if is_running() {
        // SAFETY: MPI runs; the call does not return. Neither takes the lock, which a stuck thread may hold.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
    }
    std::process::exit(code)
}

/// The number of the visit to MPI that a thread is on, where one is: of a few calls, which do not block once MPI has begun. One
/// that keeps its number for long does not return.
pub fn call_under_way() -> Option<u64> {
    let number = CALLS.load(Ordering::Relaxed);
    (!number.is_multiple_of(2)).then_some(number)
}

/// The version line of the MPI library.
pub fn library() -> String {
    let mut text = vec![0_u8; 8192];
    let mut length: c_int = 0;
    // SAFETY: may be called at any time; the buffer is larger than every MPI's MPI_MAX_LIBRARY_VERSION_STRING.
    unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast(), &mut length) };
    text.truncate(length.max(0) as usize);
    String::from_utf8_lossy(&text).trim_end_matches('\0').to_string()
}

/// Returns whether the MPI library claims to accept CUDA pointers; `None` if it does not say. Isobar passes it host memory
/// only.
pub fn takes_cuda() -> Option<bool> {
    // SAFETY: the name ends with a zero, and the search is among the libraries that are loaded already.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"MPIX_Query_cuda_support".as_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: the extension of Open MPI and MPICH of this name is `int MPIX_Query_cuda_support(void)`.
    let query = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(found) };
    Some(query() != 0)
}

static LOCK: Mutex<()> = Mutex::new(());
/// Number of times the lock was taken and released: odd while a thread holds it.
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Set where a group has failed.
static BROKEN: AtomicBool = AtomicBool::new(false);
/// Abandoned requests that MPI has not released yet: sends to ranks that refused to receive.
static GIVEN_UP: Mutex<Vec<Pending>> = Mutex::new(Vec::new());
/// The communicators of each world of the process, in the order in which they were made.
static COMMUNICATORS: Mutex<Vec<Communicators>> = Mutex::new(Vec::new());

/// The right to call MPI.
struct Lock(#[expect(dead_code, reason = "held for its drop")] MutexGuard<'static, ()>);

fn lock() -> Lock {
    let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    CALLS.fetch_add(1, Ordering::Relaxed);
    Lock(guard)
}

impl Drop for Lock {
    fn drop(&mut self) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

/// A world's two communicators.
#[derive(Clone, Copy)]
struct Communicators {
    data: Communicator,
    /// The communicator of notices.
    control: Communicator,
}

#[derive(Clone, Copy)]
struct Communicator(ffi::MPI_Comm);

// SAFETY: a communicator is a handle that MPI itself shares between threads; all calls on it are made under the lock.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

pub(crate) struct Mpi {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    data: Communicator,
    control: Communicator,
    tag_bits: u32,
    max_message: usize,
    min_row: usize,
    notices: Mutex<VecDeque<Notice>>,
    polls: AtomicUsize,
}

/// Notices kept; older ones concern operations that are long over.
const MAX_NOTICES: usize = 256;

impl Mpi {
    pub(crate) fn start(options: &Options) -> Result<Self> {
        let failed = |problem: String| Error::Start { backend: "mpi", problem };
        if !(1..=i32::MAX as usize).contains(&options.max_message) {
            return Err(failed(format!(
                "messages of at most {} bytes; expected 1 to 2^31 - 1",
                options.max_message
            )));
        }
        initialise().map_err(failed)?;
        let end = Instant::now() + options.deadline;
        let lost = |failure: Failure| Error::LostAtStart { backend: "mpi", problem: failure.0 };
        let duplicate = || duplicate(end).map_err(lost);
        let (data, control) = (duplicate()?, duplicate()?);
        COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner).push(Communicators { data, control });
        let _lock = lock();
        let (mut rank, mut size, mut found): (c_int, c_int, c_int) = (0, 0, 0);
        let mut upper: *mut c_int = std::ptr::null_mut();
        // SAFETY: the communicator is valid; the calls write ints, and a pointer to an int that MPI owns.
        let code = unsafe {
            ffi::MPI_Comm_rank(data.0, &mut rank);
            ffi::MPI_Comm_size(data.0, &mut size);
            let upper = (&raw mut upper).cast::<c_void>();
            ffi::MPI_Comm_get_attr(data.0, ffi::MPI_TAG_UB as c_int, upper, &mut found)
        };
        check(code).map_err(|f| failed(f.0))?;
        // SAFETY: where the attribute was found, the pointer is to an int.
        let upper = if found != 0 { unsafe { *upper } } else { 32767 };
        Ok(Self {
            rank: rank as usize,
            size: size as usize,
            data,
            control,
            tag_bits: (upper as u32).saturating_add(1).ilog2(),
            max_message: options.max_message,
            min_row: options.min_row,
            notices: Mutex::default(),
            polls: AtomicUsize::new(0),
        })
    }

    /// Takes in what notices have come.
    fn listen(&self) {
        while let Some(bytes) = take_any(self.control) {
            let notice = Notice::from_bytes(&bytes);
            if notice.as_ref().is_some_and(Notice::ends_group) {
                BROKEN.store(true, Ordering::Relaxed);
            }
            let mut notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
            notices.extend(notice);
            if notices.len() > MAX_NOTICES {
                notices.pop_front();
            }
        }
    }

    /// Starts the messages of one side of a transfer: what it is, then its bytes.
    fn post(&self, index: usize, tag: c_int, way: Direction, pending: &mut Pending) -> Result<(), Failure> {
        let Transfer { peer, ref tensor, ref rows, label } = pending.transfers[index];
        let bytes = nbytes(tensor);
        // SAFETY: there is a head for each transfer. (No reference is made to the others, which MPI may be writing.)
        let head = unsafe { pending.heads.as_mut_ptr().add(index) };
        if way == Direction::Send {
            // SAFETY: in place, and not yet given to MPI.
            unsafe { head.write([bytes as u64, label]) };
        }
        // SAFETY: the heads of `pending` are never moved, and live as long as its tensors.
        let request = unsafe { self.message(head.cast(), size_of::<Head>(), peer, tag, way)? };
        let awaits = if way == Direction::Receive { Awaits::Head(index) } else { Awaits::Nothing };
        pending.requests.push(Posted { request, awaits });

        let whole = Rows { offsets: vec![0], bytes };
        let rows = rows.as_ref().unwrap_or(&whole);
        let base = tensor.data_ptr().cast::<u8>();
        for &offset in &rows.offsets {
            let mut at = 0;
            while at < rows.bytes {
                let length = (rows.bytes - at).min(self.max_message);
                // SAFETY: the bytes lie in the tensor's memory: a whole tensor is contiguous, and rows were computed from
                // its strides. `pending` holds the tensor until the request is done, or for ever.
                let request = unsafe { self.message(base.add(offset + at), length, peer, tag, way)? };
                let awaits =
                    if way == Direction::Receive { Awaits::Bytes { length, peer } } else { Awaits::Nothing };
                pending.requests.push(Posted { request, awaits });
                at += length;
            }
        }
        Ok(())
    }

    /// Starts one message.
    ///
    /// # Safety
    ///
    /// `memory` has `length` bytes, which stay where they are until the request is done; of a receive, nobody else looks
    /// at them. The caller holds the lock.
    unsafe fn message(
        &self,
        memory: *mut u8,
        length: usize,
        peer: usize,
        tag: c_int,
        way: Direction,
    ) -> Result<ffi::MPI_Request, Failure> {
        let (memory, length, peer) = (memory.cast::<c_void>(), length as c_int, peer as c_int);
        // SAFETY: a handle to be written by MPI.
        let mut request: ffi::MPI_Request = unsafe { std::mem::zeroed() };
        let communicator = self.data.0;
        // SAFETY: as the caller promises.
        check(unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            match way {
                Direction::Send => {
                    ffi::MPI_Isend(memory, length, kind, peer, tag, communicator, &mut request)
                }
                Direction::Receive => {
                    ffi::MPI_Irecv(memory, length, kind, peer, tag, communicator, &mut request)
                }
            }
        })?;
        Ok(request)
    }
}

impl Backend for Arc<Mpi> {
    fn kind(&self) -> BackendKind {
        BackendKind::Mpi
    }

    fn carries(&self) -> Carries {
        Carries::Rows { at_least: self.min_row }
    }

    fn start(
        &self,
        tag: Tag,
        sends: Vec<Transfer>,
        receives: Vec<Transfer>,
    ) -> Result<Box<dyn Request>, Failure> {
        let tag = tag.pack(self.tag_bits);
        // Receives first, so that what arrives goes straight to its place.
        let receiving = receives.len();
        let transfers: Vec<Transfer> = receives.into_iter().chain(sends).collect();
        let heads = vec![[0; 2]; transfers.len()];
        let mut pending = Pending { requests: Vec::new(), transfers, heads, done: 0 };
        let _lock = lock();
        for index in 0..pending.transfers.len() {
            let way = if index < receiving { Direction::Receive } else { Direction::Send };
            self.post(index, tag, way, &mut pending)?;
        }
        Ok(Box::new(pending))
    }

    fn notify(&self, peers: &[usize], notice: &Notice) {
        if notice.ends_group() {
            BROKEN.store(true, Ordering::Relaxed);
        }
        let bytes = notice.to_bytes().leak();
        let _lock = lock();
        for &peer in peers {
            // SAFETY: the bytes live for ever, as the request may; it is freed, so that nobody waits for it.
            unsafe {
                let mut request: ffi::MPI_Request = std::mem::zeroed();
                let (memory, length) = (bytes.as_ptr().cast::<c_void>(), bytes.len() as c_int);
                let code = ffi::MPI_Isend(
                    memory,
                    length,
                    ffi::RSMPI_UINT8_T,
                    peer as c_int,
                    0,
                    self.control.0,
                    &mut request,
                );
                if check(code).is_ok() {
                    ffi::MPI_Request_free(&mut request);
                }
            }
        }
    }

    fn notice(&self, context: u32, sequence: u64) -> Option<Notice> {
        // A probe costs about what a poll does.
        if self.polls.fetch_add(1, Ordering::Relaxed).is_multiple_of(8) {
            self.listen();
        }
        let notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        notices.iter().find(|notice| notice.concerns(context, sequence)).cloned()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Send,
    Receive,
}

/// Header of a transfer: number of bytes, and label.
type Head = [u64; 2];

struct Posted {
    request: ffi::MPI_Request,
    awaits: Awaits,
}

/// Expected message.
enum Awaits {
    /// It is sent.
    Nothing,
    /// The head of this transfer.
    Head(usize),
    /// A message of this many bytes.
    Bytes { length: usize, peer: usize },
}

struct Pending {
    requests: Vec<Posted>,
    transfers: Vec<Transfer>,
    /// One for each transfer.
    heads: Vec<Head>,
    done: usize,
}

// SAFETY: requests are handles, used under the lock only; tensors are `Send`.
unsafe impl Send for Pending {}

impl Request for Pending {
    fn poll(&mut self) -> Result<bool, Failure> {
        let _lock = lock();
        while let Some(posted) = self.requests.get_mut(self.done) {
            let mut flag: c_int = 0;
            // SAFETY: a zeroed status is a valid one to be written.
            let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
            // SAFETY: the request was started and not completed: `done` is behind it.
            let code = unsafe { ffi::MPI_Test(&mut posted.request, &mut flag, &mut status) };
            if code == ffi::MPI_SUCCESS as c_int && flag == 0 {
                return Ok(false);
            }
            // MPI has freed the request, also where the message is not the expected one.
            self.done += usize::from(flag != 0);
            match posted.awaits {
                Awaits::Nothing => {}
                Awaits::Head(index) => {
                    check(code)?;
                    let transfer = &self.transfers[index];
                    // SAFETY: in place, and written by MPI, which is done with this one.
                    let [bytes, label] = unsafe { self.heads.as_ptr().add(index).read() };
                    if (bytes, label) != (nbytes(&transfer.tensor) as u64, transfer.label) {
                        return Err(transfer.foreign(bytes));
                    }
                }
                Awaits::Bytes { length: expected, peer } => {
                    let mut length: c_int = 0;
                    // SAFETY: the receive is complete, too long a message included, and has filled the status.
                    unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut length) };
                    if length as usize != expected {
                        return Err(Failure(format!(
                            "rank {peer} of the world sent a message of {length} bytes where {expected} were expected"
                        )));
                    }
                }
            }
            check(code)?;
        }
        Ok(true)
    }

    fn awaited(&mut self) -> Vec<usize> {
        let _lock = lock();
        let mut peers = Vec::new();
        for posted in &self.requests[self.done..] {
            let peer = match posted.awaits {
                Awaits::Nothing => continue,
                Awaits::Head(index) => self.transfers[index].peer,
                Awaits::Bytes { peer, .. } => peer,
            };
            let mut flag: c_int = 0;
            if !peers.contains(&peer) {
                // SAFETY: the request was started and not completed: it is not before `done`. This does not complete it.
                let code = unsafe {
                    ffi::MPI_Request_get_status(posted.request, &mut flag, ffi::RSMPI_STATUS_IGNORE)
                };
                if check(code).is_ok() && flag == 0 {
                    peers.push(peer);
                }
            }
        }
        peers
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.done == self.requests.len() {
            return;
        }
        let mut requests = Vec::new();
        {
            let _lock = lock();
            for mut posted in self.requests.drain(self.done..) {
                let mut flag: c_int = 0;
                // SAFETY: the request was started and has not been freed. Receives can be called off, sends cannot.
                let code = unsafe {
                    if !matches!(posted.awaits, Awaits::Nothing) {
                        ffi::MPI_Cancel(&mut posted.request);
                    }
                    ffi::MPI_Test(&mut posted.request, &mut flag, ffi::RSMPI_STATUS_IGNORE)
                };
                if check(code).is_ok() && flag == 0 {
                    requests.push(posted);
                }
            }
        }
        if !requests.is_empty() {
            // MPI may still read and write the buffers: they are kept for it.
            for posted in &mut requests {
                posted.awaits = Awaits::Nothing;
            }
            let (transfers, heads) = (std::mem::take(&mut self.transfers), std::mem::take(&mut self.heads));
            given_up().push(Pending { requests, transfers, heads, done: 0 });
        }
    }
}

fn given_up() -> MutexGuard<'static, Vec<Pending>> {
    GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time that processes wait for each other before they finalise MPI.
const SETTLE: Duration = Duration::from_secs(10);

/// Takes in, on all processes, what was sent and nobody received, until no send is under way; says whether it came to
/// that.
fn settle() -> bool {
    let worlds = COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Some(&Communicators { control, .. }) = worlds.first() else { return true };
    let end = Instant::now() + SETTLE;
    // SAFETY: a handle to be written by MPI.
    let mut barrier: ffi::MPI_Request = unsafe { std::mem::zeroed() };
    let mut entered = false;
    while Instant::now() < end {
        worlds.iter().for_each(|world| discard(world.data));
        let mut given_up = std::mem::take(&mut *self::given_up());
        given_up.retain_mut(|pending| !pending.poll().unwrap_or(true));
        let nothing_left = given_up.is_empty();
        self::given_up().append(&mut given_up);
        let mut flag: c_int = 0;
        let _lock = lock();
        // SAFETY: the communicator is valid, and all processes enter the barrier once.
        let code = unsafe {
            if nothing_left && !entered {
                entered = true;
                ffi::MPI_Ibarrier(control.0, &mut barrier)
            } else if entered {
                ffi::MPI_Test(&mut barrier, &mut flag, ffi::RSMPI_STATUS_IGNORE)
            } else {
                ffi::MPI_SUCCESS as c_int
            }
        };
        match check(code) {
            Ok(()) if flag != 0 => return true,
            Ok(()) => std::thread::yield_now(),
            Err(_) => return false,
        }
    }
    false
}

/// A message that has come in on a communicator, from whomever.
fn take_any(communicator: Communicator) -> Option<Vec<u8>> {
    let _lock = lock();
    let mut flag: c_int = 0;
    // SAFETY: a zeroed status is a valid one to be written; the communicator is valid.
    let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let code = unsafe {
        ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG, communicator.0, &mut flag, &mut status)
    };
    if check(code).is_err() || flag == 0 {
        return None;
    }
    let mut length: c_int = 0;
    // SAFETY: the probe has filled the status.
    unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut length) };
    let mut bytes = vec![0_u8; length.max(0) as usize];
    // SAFETY: the message was probed, so that the receive ends by itself; the buffer has its length.
    let code = unsafe {
        ffi::MPI_Recv(
            bytes.as_mut_ptr().cast(),
            length,
            ffi::RSMPI_UINT8_T,
            status.MPI_SOURCE,
            status.MPI_TAG,
            communicator.0,
            ffi::RSMPI_STATUS_IGNORE,
        )
    };
    check(code).ok().map(|()| bytes)
}

/// Receives what has come in on a communicator, and forgets it.
fn discard(communicator: Communicator) {
    while take_any(communicator).is_some() {}
}

fn initialise() -> std::result::Result<(), String> {
    let _lock = lock();
    let (mut begun, mut ended, mut level): (c_int, c_int, c_int) = (0, 0, 0);
    // SAFETY: the calls may be made at any time and write one int each; MPI is initialised once, under the lock.
    unsafe {
        ffi::MPI_Finalized(&mut ended);
        if ended != 0 {
            return Err("MPI has ended in this process; it can be initialised once only".into());
        }
        ffi::MPI_Initialized(&mut begun);
        let code = match begun {
            0 => ffi::MPI_Init_thread(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                ffi::RSMPI_THREAD_SERIALIZED,
                &mut level,
            ),
            _ => ffi::MPI_Query_thread(&mut level),
        };
        check(code).map_err(|failure| failure.0)?;
        if level < ffi::RSMPI_THREAD_SERIALIZED {
            return Err(format!(
                "MPI gives thread level {level}; expected MPI_THREAD_SERIALIZED or above, since backward passes may run \
                 on other threads"
            ));
        }
        // MPI 4 reports errors of calls without a communicator to that of the process alone, which would end the job.
        for communicator in [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] {
            check(ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN)).map_err(|f| f.0)?;
        }
        Ok(())
    }
}

/// A communicator of all processes that no other library uses.
fn duplicate(deadline: Instant) -> Result<Communicator, Failure> {
    // SAFETY: handles to be written by MPI.
    let (mut copy, mut request): (ffi::MPI_Comm, ffi::MPI_Request) = unsafe { std::mem::zeroed() };
    // SAFETY: the world's communicator is valid, and all processes call.
    check(unsafe { ffi::MPI_Comm_idup(ffi::RSMPI_COMM_WORLD, &mut copy, &mut request) })?;
    let mut flag: c_int = 0;
    while flag == 0 {
        // SAFETY: the request is under way.
        check(unsafe { ffi::MPI_Test(&mut request, &mut flag, ffi::RSMPI_STATUS_IGNORE) })?;
        if Instant::now() > deadline {
            return Err(Failure("not all processes came to the start by the deadline".into()));
        }
        std::thread::yield_now();
    }
    // SAFETY: the communicator is complete.
    check(unsafe { ffi::MPI_Comm_set_errhandler(copy, ffi::RSMPI_ERRORS_RETURN) })?;
    Ok(Communicator(copy))
}

fn check(code: c_int) -> Result<(), Failure> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0; 4096];
    let mut length: c_int = 0;
    // SAFETY: the buffer is larger than every MPI's MPI_MAX_ERROR_STRING, and the call ends it with a zero.
    let text = unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length);
        CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    };
    Err(Failure(text))
}
