//! Recorders of communication, attached to a world. Where none is attached, an operation pays one atomic load.

mod chrome;
mod record;
mod table;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::observe::label;

pub use chrome::{ChromeSlice, chrome_trace};
pub use record::{CommEvent, CommRecord};

/// More operations than this are counted, and not kept: a trace that was forgotten must not fill the memory.
const LIMIT: usize = 1 << 20;

/// The traces of a world.
#[derive(Default)]
pub(crate) struct Traces {
    attached: AtomicUsize,
    recorders: Mutex<Vec<Arc<Recorder>>>,
}

impl Traces {
    pub(crate) fn attach(&self, recorder: Arc<Recorder>) {
        let mut recorders = lock(&self.recorders);
        recorders.push(recorder);
        self.attached.store(recorders.len(), Ordering::Release);
    }

    pub(crate) fn detach(&self, recorder: &Arc<Recorder>) {
        let mut recorders = lock(&self.recorders);
        recorders.retain(|other| !Arc::ptr_eq(other, recorder));
        self.attached.store(recorders.len(), Ordering::Release);
    }

    /// An operation begins: where it is recorded.
    pub(crate) fn begin(&self, operation: &'static str, group: &str, sequence: u64) -> Vec<Entry> {
        if self.attached.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let (module, backward) = label::current();
        let entry = |recorder: &Arc<Recorder>| {
            let now = recorder.now();
            let event = CommEvent {
                rank: recorder.rank,
                operation: operation.into(),
                group: group.to_owned(),
                sequence,
                module: module.as_deref().unwrap_or_default().to_owned(),
                backward,
                sent: 0,
                received: 0,
                begin_ns: now,
                end_ns: now,
            };
            let mut state = lock(&recorder.state);
            if state.events.len() == LIMIT {
                state.dropped += 1;
                return None;
            }
            state.events.push(event);
            Some(Entry { recorder: recorder.clone(), index: state.events.len() - 1 })
        };
        lock(&self.recorders).iter().filter_map(entry).collect()
    }
}

/// An operation's place in a trace.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    recorder: Arc<Recorder>,
    index: usize,
}

impl Entry {
    pub(crate) fn count(&self, sent: usize, received: usize) {
        if let Some(event) = lock(&self.recorder.state).events.get_mut(self.index) {
            event.sent += sent as u64;
            event.received += received as u64;
        }
    }

    /// The operation has ended, or a part of it: the last counts.
    pub(crate) fn end(&self) {
        let now = self.recorder.now();
        if let Some(event) = lock(&self.recorder.state).events.get_mut(self.index) {
            event.end_ns = now;
        }
    }
}

/// Recorder of one trace.
#[derive(Debug)]
pub(crate) struct Recorder {
    rank: usize,
    epoch_ns: u64,
    since: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<CommEvent>,
    dropped: u64,
}

impl Recorder {
    /// Creates an empty recorder for this rank of the world.
    pub(crate) fn new(rank: usize) -> Self {
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { rank, epoch_ns: began.as_nanos() as u64, since: Instant::now(), state: Mutex::default() }
    }

    /// Returns the record so far.
    pub(crate) fn record(&self) -> CommRecord {
        let state = lock(&self.state);
        CommRecord::new(state.events.clone(), state.dropped)
    }

    /// Nanoseconds of the clock that ranks of a machine share, and that does not jump within a trace.
    fn now(&self) -> u64 {
        self.epoch_ns + self.since.elapsed().as_nanos() as u64
    }
}

/// A panic elsewhere must not end a run because of its trace.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
