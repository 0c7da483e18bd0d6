//! The flight recorder: the last operations of a rank, kept at all times, so that they are there when a rank is lost.
//!
//! Each world has one. It keeps a fixed number of operations in memory that is set aside at the start, one entry a
//! collective: an operation costs a few uncontended locks and two readings of the clock. Nothing is written anywhere: who
//! wants a record asks for it with [`Group::flight`](crate::Group::flight).
//!
//! It sends nothing and compares nothing.
//!
//! ```
//! use isobar_collectives::flight::{FlightState, Phase};
//! use isobar_collectives::{Group, ReduceOp, all_reduce};
//! use tch::Tensor;
//!
//! let group = Group::single();
//! group.mark(Phase::Forward, 7);
//! all_reduce(&Tensor::from_slice(&[1.0]), ReduceOp::Sum, &group)?;
//! let entries = group.flight().entries(usize::MAX, false);
//! assert_eq!((entries[0].operation.as_str(), entries[0].state), ("all_reduce", FlightState::Finished));
//! assert_eq!((entries[0].phase, entries[0].step), (Phase::Forward, 7));
//! # Ok::<(), isobar_collectives::Error>(())
//! ```

mod phase;
mod record;
mod runs;

use std::backtrace::Backtrace;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tch::Kind;

use crate::local::reduce::ReduceOp;
use crate::observe::label::current as scope;
use phase::Marker;

pub use phase::{Phase, on_phase};
pub use record::{FlightEntry, FlightGroup, FlightState};

/// Number of operations that are kept.
const ENTRIES: usize = 256;

/// The most dims, and the most sizes, of an operation that are kept.
const DIMS: usize = 8;
const SIZES: usize = 16;

/// From so long a wait on, who waits is recorded: it costs some microseconds.
const LONG: Duration = Duration::from_millis(100);

/// A world's flight recorder; a clone is the same.
#[derive(Clone)]
pub struct Flight(Arc<Inner>);

struct Inner {
    on: AtomicBool,
    epoch_ns: u64,
    since: Instant,
    marker: Marker,
    ring: Mutex<Ring>,
    places: Mutex<Vec<Weak<Place>>>,
    /// The first failure that came from other ranks.
    trouble: OnceLock<String>,
    waited_ns: AtomicU64,
}

/// A group, as the recorder knows it.
pub(crate) struct Place {
    pub(crate) context: u32,
    pub(crate) name: Arc<str>,
    pub(crate) ranks: Vec<usize>,
    /// Number of operations that this rank has begun.
    pub(crate) begun: AtomicU64,
}

struct Ring {
    slots: Vec<Slot>,
    /// The number of the next operation.
    next: u64,
}

#[derive(Clone)]
struct Slot {
    number: u64,
    operation: &'static str,
    purpose: Option<&'static str>,
    place: Option<Arc<Place>>,
    sequence: u64,
    peer: Option<usize>,
    kind: Option<Kind>,
    shape: Few<DIMS>,
    dim: Option<usize>,
    concat_dim: Option<usize>,
    reduction: Option<ReduceOp>,
    sizes: Few<SIZES>,
    receives: Few<SIZES>,
    root: Option<usize>,
    module: Option<Arc<str>>,
    backward: bool,
    state: FlightState,
    marker: u64,
    begin_ns: u64,
    end_ns: u64,
    problem: Option<Arc<str>>,
    stack: Option<Arc<Backtrace>>,
}

/// The first few of some numbers, in place.
#[derive(Clone)]
struct Few<const N: usize> {
    numbers: [i64; N],
    length: usize,
    /// A digest of the others; 0 where there is none.
    others: u64,
}

impl<const N: usize> Few<N> {
    const NONE: Self = Self { numbers: [0; N], length: 0, others: 0 };

    fn of(numbers: &[i64]) -> Self {
        let mut few = Self::NONE;
        few.length = numbers.len().min(N);
        few.numbers[..few.length].copy_from_slice(&numbers[..few.length]);
        few.others = digest(&numbers[few.length..]);
        few
    }

    fn to_vec(&self) -> Vec<i64> {
        self.numbers[..self.length].to_vec()
    }
}

/// A number that stands for these, and is not 0; 0 for none.
fn digest(numbers: &[i64]) -> u64 {
    if numbers.is_empty() {
        return 0;
    }
    // Its keys are fixed, so that the ranks, which run one program, agree.
    let mut hasher = DefaultHasher::new();
    numbers.hash(&mut hasher);
    hasher.finish().max(1)
}

impl Slot {
    const EMPTY: Self = Self {
        number: u64::MAX,
        operation: "",
        purpose: None,
        place: None,
        sequence: 0,
        peer: None,
        kind: None,
        shape: Few::NONE,
        dim: None,
        concat_dim: None,
        reduction: None,
        sizes: Few::NONE,
        receives: Few::NONE,
        root: None,
        module: None,
        backward: false,
        state: FlightState::Called,
        marker: 0,
        begin_ns: 0,
        end_ns: 0,
        problem: None,
        stack: None,
    };

    fn entry(self, stacks: bool) -> Option<FlightEntry> {
        let place = self.place?;
        let (phase, step) = phase::read(self.marker);
        Some(FlightEntry {
            number: self.number,
            operation: self.operation.to_owned(),
            purpose: self.purpose.map(str::to_owned),
            group: place.name.to_string(),
            context: place.context,
            sequence: self.sequence,
            peer: self.peer,
            kind: self.kind.map(|kind| format!("{kind:?}")),
            shape: self.shape.to_vec(),
            dim: self.dim,
            concat_dim: self.concat_dim,
            reduction: self.reduction.map(|op| format!("{op:?}")),
            sizes: self.sizes.to_vec(),
            receives: self.receives.to_vec(),
            other_sizes: self.sizes.others,
            root: self.root,
            module: self.module.as_deref().unwrap_or_default().to_owned(),
            backward: self.backward,
            state: self.state,
            phase,
            step,
            begin_ns: self.begin_ns,
            end_ns: self.end_ns,
            problem: self.problem.as_deref().map(str::to_owned),
            stack: self.stack.filter(|_| stacks).map_or_else(Vec::new, |stack| record::frames(&stack)),
        })
    }
}

impl Flight {
    pub(crate) fn new() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(Arc::new(Inner {
            on: AtomicBool::new(true),
            epoch_ns: epoch.as_nanos() as u64,
            since: Instant::now(),
            marker: Marker::default(),
            ring: Mutex::new(Ring { slots: vec![Slot::EMPTY; ENTRIES], next: 0 }),
            places: Mutex::default(),
            trouble: OnceLock::new(),
            waited_ns: AtomicU64::new(0),
        }))
    }

    /// The last `most` operations, in the order in which they began. `stacks`: with who waits for them, whose names are
    /// looked up now, which may take a while.
    pub fn entries(&self, most: usize, stacks: bool) -> Vec<FlightEntry> {
        let mut slots: Vec<Slot> =
            self.ring().slots.iter().filter(|slot| slot.place.is_some()).cloned().collect();
        slots.sort_unstable_by_key(|slot| slot.number);
        let older = slots.len().saturating_sub(most);
        slots.into_iter().skip(older).filter_map(|slot| slot.entry(stacks)).collect()
    }

    /// Switches the recording of operations on (the default) or off, to measure its cost. Operations that are not recorded have
    /// no fingerprint either, so all ranks of the world must call this at the same place among their operations.
    pub fn record(&self, on: bool) {
        self.0.on.store(on, Ordering::Relaxed);
    }

    /// The groups of this rank that are in use.
    pub fn groups(&self) -> Vec<FlightGroup> {
        let places: Vec<Arc<Place>> = self.places().iter().filter_map(Weak::upgrade).collect();
        let group = |place: &Arc<Place>| FlightGroup {
            context: place.context,
            name: place.name.to_string(),
            ranks: place.ranks.clone(),
            begun: place.begun.load(Ordering::Relaxed),
        };
        places.iter().map(group).collect()
    }

    /// Returns the rank's current phase and step; see [`Group::mark`](crate::Group::mark).
    pub fn phase(&self) -> (Phase, u64) {
        phase::read(self.0.marker.word())
    }

    /// The first failure that came from other ranks: a deadline, a lost connection, a rank that said that it cannot go on.
    pub fn trouble(&self) -> Option<&str> {
        self.0.trouble.get().map(String::as_str)
    }

    /// For how long this rank has waited for operations so far, for what their bytes need and for ranks that come later. What
    /// it computes while they go on is not in it.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.0.waited_ns.load(Ordering::Relaxed))
    }

    pub(crate) fn has_waited(&self, time: Duration) {
        self.0.waited_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn mark(&self, phase: Phase, step: u64) {
        self.0.marker.set(phase, step);
    }

    pub(crate) fn troubled(&self, problem: &str) {
        let _ = self.0.trouble.set(problem.to_owned());
    }

    pub(crate) fn place(&self, name: &str, context: u32, ranks: Vec<usize>) -> Arc<Place> {
        let place = Arc::new(Place { context, name: name.into(), ranks, begun: AtomicU64::new(0) });
        let mut places = self.places();
        places.retain(|place| place.strong_count() > 0);
        places.push(Arc::downgrade(&place));
        place
    }

    /// Context of each group, and the number of operations that this rank has begun in it.
    pub(crate) fn begun(&self) -> Vec<(u32, u64)> {
        let places = self.places();
        let begun = |place: Arc<Place>| (place.context, place.begun.load(Ordering::Relaxed));
        places.iter().filter_map(Weak::upgrade).map(begun).collect()
    }

    /// An operation begins; its number.
    pub(crate) fn begin(
        &self,
        operation: &'static str,
        place: &Arc<Place>,
        sequence: u64,
        peer: Option<usize>,
    ) -> Recorded {
        if !self.0.on.load(Ordering::Relaxed) {
            return Recorded::NOWHERE;
        }
        let (module, backward) = scope();
        let begin_ns = self.now();
        let marker = self.0.marker.word();
        let mut ring = self.ring();
        let number = ring.next;
        ring.next += 1;
        let place = Some(place.clone());
        let old = std::mem::replace(
            &mut ring.slots[number as usize % ENTRIES],
            Slot {
                number,
                operation,
                place,
                sequence,
                peer,
                module,
                backward,
                marker,
                begin_ns,
                ..Slot::EMPTY
            },
        );
        drop(ring);
        // Outside of the lock, as it may free memory.
        drop(old);
        Recorded { flight: Some(self.clone()), number }
    }

    fn change<T>(&self, number: u64, change: impl FnOnce(&mut Slot) -> T) -> Option<T> {
        let mut ring = self.ring();
        let slot = &mut ring.slots[number as usize % ENTRIES];
        // It may have been overwritten since.
        (slot.number == number).then(|| change(slot))
    }

    /// Nanoseconds of the clock that ranks of a machine share, and that does not jump.
    fn now(&self) -> u64 {
        self.0.epoch_ns + self.0.since.elapsed().as_nanos() as u64
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn places(&self) -> MutexGuard<'_, Vec<Weak<Place>>> {
        self.0.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (phase, step) = self.phase();
        write!(f, "flight recorder ({} operations, {phase} of step {step})", self.ring().next)
    }
}

/// An operation's place in the recorder.
#[derive(Clone)]
pub(crate) struct Recorded {
    flight: Option<Flight>,
    number: u64,
}

impl Recorded {
    /// Entry of an operation that is not recorded.
    pub(crate) const NOWHERE: Self = Self { flight: None, number: 0 };

    /// Returns whether the operation is recorded.
    pub(crate) fn is_somewhere(&self) -> bool {
        self.flight.is_some()
    }

    /// Returns the record so far.
    pub(crate) fn entry(&self) -> Option<FlightEntry> {
        self.look(|slot| slot.clone().entry(false)).flatten()
    }

    /// Records dtype and shape of the operation.
    pub(crate) fn describe(&self, kind: Kind, shape: &[i64]) {
        self.change(|slot| (slot.kind, slot.shape) = (Some(kind), Few::of(shape)));
    }

    /// Records the dim along which the operation cuts, then another along which it joins.
    pub(crate) fn along(&self, dim: usize) {
        self.change(|slot| match slot.dim {
            None => slot.dim = Some(dim),
            Some(cut) if cut == dim => {}
            Some(_) => slot.concat_dim = Some(dim),
        });
    }

    /// Records what an exchange of bytes is for.
    pub(crate) fn purpose(&self, purpose: &'static str) {
        self.change(|slot| slot.purpose = Some(purpose));
    }

    /// Records the reduction of an operation that combines values.
    pub(crate) fn reduction(&self, op: ReduceOp) {
        self.change(|slot| slot.reduction = Some(op));
    }

    /// The sizes of the ranks' parts; the first count.
    pub(crate) fn sizes(&self, sizes: &[i64]) {
        self.change(|slot| {
            if slot.sizes.length == 0 {
                slot.sizes = Few::of(sizes);
            }
        });
    }

    /// Records the sizes that the other ranks send, for exchanges.
    pub(crate) fn receives(&self, sizes: &[i64]) {
        self.change(|slot| slot.receives = Few::of(sizes));
    }

    /// The rank of the group that sends or receives all.
    pub(crate) fn root(&self, root: usize) {
        self.change(|slot| slot.root = Some(root));
    }

    pub(crate) fn started(&self) {
        self.change(|slot| {
            if slot.state == FlightState::Called {
                slot.state = FlightState::Started;
            }
        });
    }

    /// The rank waits for it, since `waited`. Says whether that is all there is to record.
    pub(crate) fn waiting(&self, waited: Duration) -> bool {
        let long = waited >= LONG;
        let stack = long.then(|| Arc::new(Backtrace::force_capture()));
        self.change(|slot| {
            if slot.state == FlightState::Started {
                slot.state = FlightState::Waiting;
            }
            slot.stack = stack;
        });
        long
    }

    /// It has ended, or a part of it: the last counts.
    pub(crate) fn ended(&self, problem: Option<&str>) {
        let Some(flight) = &self.flight else { return };
        let now = flight.now();
        let state = if problem.is_some() { FlightState::Failed } else { FlightState::Finished };
        let problem: Option<Arc<str>> = problem.map(Into::into);
        self.change(|slot| {
            // A failed operation stays failed.
            if slot.state != FlightState::Failed {
                (slot.state, slot.end_ns, slot.problem) = (state, now, problem);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Slot)) {
        self.look(change);
    }

    fn look<T>(&self, look: impl FnOnce(&mut Slot) -> T) -> Option<T> {
        self.flight.as_ref().and_then(|flight| flight.change(self.number, look))
    }
}

impl std::fmt::Debug for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "operation {}", self.number)
    }
}

#[cfg(test)]
mod tests;
