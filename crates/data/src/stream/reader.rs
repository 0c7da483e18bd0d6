//! Threads that read requests ahead.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::account::{Account, Claim, Job, Limits, State, Status};
use super::source::{Rows, Source};
use crate::samples::Request;
use crate::{Error, HostMemory, Result};

/// Options of a [`Reader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReaderOptions {
    /// Most memory of batches that are read ahead, of those that are being read, and of what is kept.
    pub host_memory: HostMemory,
    /// Background threads; without any, batches are read when they are needed.
    pub workers: usize,
    /// True to keep what was read, as far as the memory allows.
    pub keep: bool,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self { host_memory: HostMemory::default(), workers: 2, keep: false }
    }
}

/// Most background threads of a rank.
const MOST_WORKERS: usize = 64;

/// Background threads that read what [`Streamed`](super::Streamed) samples announce, in the order of announcement, with one
/// budget of memory for all of them. They end when it is dropped.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    host_memory: HostMemory,
    threads: Vec<JoinHandle<()>>,
    /// Held while a request is waited for: the queue's first job is its own.
    consumer: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what was claimed, without the lock.
    fn read<'a>(&'a self, claim: Claim, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        drop(state);
        let read = guarded(&claim);
        let mut state = self.lock();
        state.finish(claim, read);
        self.changed.notify_all();
        state
    }

    /// Body of a background thread.
    fn work(&self) {
        let mut state = self.lock();
        while !state.closing {
            state = match state.next_claim() {
                Some(claim) => self.read(claim, state),
                None => self.wait(state),
            };
        }
    }
}

/// Reads what was claimed; a panic is an error like any other, for the rank that waits for it.
fn guarded(claim: &Claim) -> Result<Rows> {
    let read = catch_unwind(AssertUnwindSafe(|| claim.source.read(&claim.missing)));
    read.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(Error::Invalid(format!("reading {} panicked: {text}", claim.source.path().display())))
    })
}

impl Reader {
    /// Starts the threads.
    ///
    /// # Errors
    /// More than 64 threads, or threads that the system refuses.
    pub fn new(options: ReaderOptions) -> Result<Self> {
        let ReaderOptions { host_memory, workers, keep } = options;
        if workers > MOST_WORKERS {
            return Err(Error::Config(format!(
                "data.workers is {workers}, expected 0 to {MOST_WORKERS}; --set data.workers={MOST_WORKERS}"
            )));
        }
        let depth = workers.saturating_mul(2);
        let limits = Limits { budget: host_memory.bytes(), depth, workers, cache: keep };
        let shared = Arc::new(Shared { state: Mutex::new(State::new(limits)), changed: Condvar::new() });
        // Dropped on an error, so that threads that were started end.
        let mut reader = Self { shared, host_memory, threads: Vec::new(), consumer: Mutex::new(()) };
        for number in 0..workers {
            let shared = reader.shared.clone();
            let thread = Builder::new().name(format!("isobar-data-{number}")).spawn(move || shared.work());
            let refused =
                |error| Error::Invalid(format!("cannot start data.workers = {workers} threads: {error}"));
            reader.threads.push(thread.map_err(refused)?);
        }
        Ok(reader)
    }

    /// Returns the most memory of batches and of what is kept.
    pub fn host_memory(&self) -> HostMemory {
        self.host_memory
    }

    /// Returns the bytes that were read, and the memory in use.
    pub fn account(&self) -> Account {
        self.shared.lock().account
    }

    /// Announces the next requests of a source, replacing earlier ones. Prefetched data of requests that are announced again are kept.
    pub(super) fn announce(&self, source: &Arc<Source>, coming: Vec<Request>) {
        let _one = self.consumer.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.lock().announce(source, coming);
        self.shared.changed.notify_all();
    }

    /// Announces requests of a source that follow all others.
    pub(super) fn announce_after(&self, source: &Arc<Source>, coming: Vec<Request>) {
        let _one = self.consumer.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.lock().announce_after(source, coming);
        self.shared.changed.notify_all();
    }

    /// Waits for the rows of a request, reads them if no thread has begun to, and makes something of them.
    pub(super) fn take<T>(
        &self,
        source: &Arc<Source>,
        request: &Request,
        make: impl FnOnce(&Rows) -> Result<T>,
    ) -> Result<T> {
        let _one = self.consumer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut job = self.finished(source, request);
        // Rows are in the account until the batch is made.
        let made = match std::mem::replace(&mut job.status, Status::Waiting) {
            Status::Done(rows) => rows.and_then(|rows| make(&rows)),
            Status::Waiting | Status::Reading => Err(self.shared.lock().too_large(&job)),
        };
        self.shared.lock().release(&job);
        self.shared.changed.notify_all();
        made
    }

    /// Takes the job of a request from the queue when it is done, or if it never fits into memory.
    fn finished(&self, source: &Arc<Source>, request: &Request) -> Job {
        let mut state = self.shared.lock();
        state.bring_first(source, request);
        self.shared.changed.notify_all();
        loop {
            state = match state.jobs.front().map(|job| &job.status) {
                None | Some(Status::Done(_)) => break,
                Some(Status::Reading) => self.shared.wait(state),
                Some(Status::Waiting) => match state.claim(0) {
                    Some(claim) => self.shared.read(claim, state),
                    None if state.is_done(0) || state.make_room() => state,
                    None if state.is_reading() => self.shared.wait(state),
                    None => break,
                },
            };
        }
        let job = state.jobs.pop_front();
        job.unwrap_or_else(|| state.job(source, request.clone()))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Panics of a thread were errors of what it read.
            let _ = thread.join();
        }
    }
}
