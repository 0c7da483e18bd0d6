//! Traces of communication: every collective and message that a rank begins while a trace is attached.
//!
//! A [`CommTrace`] is attached to a group's world, and records the operations of all groups of that world; a [`module`]
//! label says for which part of a model they were. Where none is attached, an operation pays one atomic load.
//!
//! ```
//! use isobar_collectives::{Group, ReduceOp, all_reduce, trace};
//! use tch::Tensor;
//!
//! let group = Group::single();
//! let trace = trace::CommTrace::start(&group);
//! {
//!     let _label = trace::module("head");
//!     all_reduce(&Tensor::from_slice(&[1.0]), ReduceOp::Sum, &group)?;
//! }
//! trace.stop();
//! let record = trace.record();
//! assert_eq!(record.count("all_reduce"), 1);
//! assert_eq!(record.of_module("head").received(), 0); // from nobody
//! # Ok::<(), isobar_collectives::Error>(())
//! ```

mod label;
mod record;
mod table;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub(crate) use label::current as scope;
pub use label::{Label, LabelGuard, module};
pub use record::{CommEvent, CommRecord};

use crate::group::Group;

/// More operations than this are counted, and not kept: a trace that was forgotten must not fill the memory.
const LIMIT: usize = 1 << 20;

/// Records what this rank communicates until it is stopped or dropped.
///
/// Every rank that wants a record starts its own; this does not communicate. Several may be attached at once, and each
/// records everything.
#[must_use = "operations are recorded while the trace lives"]
pub struct CommTrace {
    recorder: Arc<Recorder>,
    group: Group,
}

impl CommTrace {
    /// Attaches a trace to the world of `group`: it records the operations of all groups of the world that this rank begins
    /// from now on.
    pub fn start(group: &Group) -> Self {
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let recorder = Arc::new(Recorder {
            rank: group.world_rank(),
            epoch_ns: began.as_nanos() as u64,
            since: Instant::now(),
            state: Mutex::default(),
        });
        group.traces().attach(recorder.clone());
        Self { recorder, group: group.clone() }
    }

    /// Records no more. What was recorded stays; a second call changes nothing.
    pub fn stop(&self) {
        self.group.traces().detach(&self.recorder);
    }

    /// Returns the record so far.
    pub fn record(&self) -> CommRecord {
        let state = lock(&self.recorder.state);
        CommRecord::new(state.events.clone(), state.dropped)
    }

    /// Returns the number of operations with this name.
    pub fn count(&self, operation: &str) -> usize {
        self.record().count(operation)
    }

    /// Bytes that this rank has sent to others.
    pub fn sent(&self) -> u64 {
        self.record().sent()
    }

    /// Bytes that this rank has received from others.
    pub fn received(&self) -> u64 {
        self.record().received()
    }
}

impl Drop for CommTrace {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for CommTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.record())
    }
}

/// The traces of a world.
#[derive(Default)]
pub(crate) struct Traces {
    attached: AtomicUsize,
    recorders: Mutex<Vec<Arc<Recorder>>>,
}

impl Traces {
    fn attach(&self, recorder: Arc<Recorder>) {
        let mut recorders = lock(&self.recorders);
        recorders.push(recorder);
        self.attached.store(recorders.len(), Ordering::Release);
    }

    fn detach(&self, recorder: &Arc<Recorder>) {
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

#[derive(Debug)]
struct Recorder {
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
    /// Nanoseconds of the clock that ranks of a machine share, and that does not jump within a trace.
    fn now(&self) -> u64 {
        self.epoch_ns + self.since.elapsed().as_nanos() as u64
    }
}

/// A panic elsewhere must not end a run because of its trace.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
