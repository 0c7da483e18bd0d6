//! Groups of ranks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::backend::nccl::DeviceCommunicator;
use crate::backend::single::Single;
use crate::engine::comparison::Fingerprints;
use crate::engine::outstanding::Outstanding;
use crate::observe::flight::{Flight, Phase, Place};
use crate::observe::trace::Traces;
use crate::wire::{Backend, BackendKind, Notice};
use tch::Device;

/// An ordered set of ranks that communicate.
///
/// All ranks of a group make the same calls in the same order; each call has a number, and messages of different calls
/// never mix. A clone is the same group. Calls on one group come from one thread at a time.
///
/// A rank that refuses a call for its arguments tells the others, so that all get an error and the group stays usable.
/// A call that does not end by the deadline ends the group: later calls fail at once.
#[derive(Clone)]
pub struct Group(pub(super) Arc<Inner>);

pub(super) struct Inner {
    /// Name, number and ranks, and how many operations were begun.
    pub(super) place: Arc<Place>,
    pub(super) rank: usize,
    pub(super) deadline: Duration,
    /// Running digest of what the ranks have agreed on; part of each message's label.
    pub(super) fingerprint: AtomicU64,
    /// Number of messages exchanged with each rank by `send` and `recv`, which are not collective.
    pub(super) pairs: Mutex<HashMap<(usize, Direction), u64>>,
    pub(super) failure: OnceLock<String>,
    /// Number of operations that a rank which left had begun, and the time it left. These operations may finish.
    pub(super) spared: OnceLock<(u64, Instant)>,
    pub(super) device: OnceLock<DeviceCommunicator>,
    pub(super) world: Arc<World>,
}

/// State shared by all groups of a world.
pub(super) struct World {
    pub(super) backend: Box<dyn Backend>,
    pub(super) next_context: AtomicU32,
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) operations: AtomicU64,
    pub(super) outstanding: Outstanding,
    pub(super) traces: Traces,
    pub(super) flight: Flight,
    /// Choice of the operations that are compared.
    pub(super) fingerprints: AtomicU8,
}

/// Direction of a message of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    To,
    From,
}

/// Data that a rank has exchanged since its world was created, over all groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Collectives and messages begun.
    pub operations: u64,
    /// Bytes sent to other ranks.
    pub sent: u64,
    /// Bytes received from other ranks.
    pub received: u64,
}

impl Group {
    /// A group of one rank, for programs that run alone, with a deadline of 300 s.
    pub fn single() -> Self {
        Self::single_with(Duration::from_secs(300))
    }

    /// A group of one rank with this deadline, which bounds what its owner waits for outside the group, such as locks.
    pub fn single_with(deadline: Duration) -> Self {
        Self::world(Box::new(Single), 0, 1, deadline)
    }

    /// The group of all ranks over a backend.
    pub(crate) fn world(backend: Box<dyn Backend>, rank: usize, size: usize, deadline: Duration) -> Self {
        let world = World {
            backend,
            next_context: AtomicU32::new(1),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            outstanding: Outstanding::default(),
            traces: Traces::default(),
            flight: Flight::new(),
            fingerprints: AtomicU8::new(Fingerprints::default().code()),
        };
        Self::make("world", (0..size).collect(), rank, 0, deadline, Arc::new(world))
    }

    pub(super) fn make(
        name: &str,
        ranks: Vec<usize>,
        rank: usize,
        context: u32,
        deadline: Duration,
        world: Arc<World>,
    ) -> Self {
        Self(Arc::new(Inner {
            place: world.flight.place(name, context, ranks),
            rank,
            deadline,
            fingerprint: AtomicU64::new(0),
            pairs: Mutex::default(),
            failure: OnceLock::new(),
            spared: OnceLock::new(),
            device: OnceLock::new(),
            world,
        }))
    }

    /// This process's rank in the group, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.place.ranks.len()
    }

    /// The name given when the group was made; that of all ranks is `world`.
    pub fn name(&self) -> &str {
        &self.0.place.name
    }

    /// The members' ranks in the world, in the group's order.
    pub fn ranks(&self) -> &[usize] {
        &self.0.place.ranks
    }

    /// Timeout of a call.
    pub fn deadline(&self) -> Duration {
        self.0.deadline
    }

    /// Returns the backend that carries host memory.
    pub fn backend(&self) -> BackendKind {
        self.0.world.backend.kind()
    }

    /// The number of calls that were begun; the next one has this number.
    pub fn sequence(&self) -> u64 {
        self.0.place.begun.load(Ordering::Relaxed)
    }

    /// Returns the reason why the group can no longer be used; `None` if it can.
    pub fn failure(&self) -> Option<&str> {
        self.0.failure.get().map(String::as_str)
    }

    /// Returns the data exchanged by this rank so far, over all groups of its world.
    pub fn traffic(&self) -> Traffic {
        let World { sent, received, operations, .. } = &*self.0.world;
        Traffic {
            operations: operations.load(Ordering::Relaxed),
            sent: sent.load(Ordering::Relaxed),
            received: received.load(Ordering::Relaxed),
        }
    }

    /// Takes into account something that all ranks of the group know alike, such as the layout of a tensor: from the next call
    /// on, ranks that were told other things, or in another order, do not take each other's messages, but get an error.
    ///
    /// Does not communicate.
    pub fn fingerprint_with(&self, digest: u64) {
        let so_far = self.0.fingerprint.load(Ordering::Relaxed);
        // One step of a multiplicative hash: order counts.
        let next = (so_far.rotate_left(5) ^ digest).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0.fingerprint.store(next, Ordering::Relaxed);
    }

    /// Tells all ranks of the group that this one leaves, so that their waits end with an error that says why. Collectives that
    /// this rank has begun may still finish on the others, within two seconds; messages between two ranks end at once.
    pub fn leave(&self, why: &str) {
        self.notify(Notice::ALL, why);
        let _ = self.0.failure.set(format!("this rank left it: {why}"));
    }

    /// Says what this rank is doing from now on, and in which step: operations are recorded with it. Does not communicate.
    pub fn mark(&self, phase: Phase, step: u64) {
        self.0.world.flight.mark(phase, step);
    }

    /// The last operations of this rank, over all groups of its world.
    pub fn flight(&self) -> Flight {
        self.0.world.flight.clone()
    }

    /// Says which operations the ranks agree on before they exchange data, over all groups of the world, from the next
    /// operation on. All ranks of the world call, with the same, at the same place among their operations. Does not communicate.
    pub fn set_fingerprints(&self, fingerprints: Fingerprints) {
        self.0.world.fingerprints.store(fingerprints.code(), Ordering::Relaxed);
    }

    /// Returns the choice of the operations that ranks compare.
    pub fn fingerprints(&self) -> Fingerprints {
        Fingerprints::of(self.0.world.fingerprints.load(Ordering::Relaxed))
    }

    /// Returns the traces attached to this group's world.
    pub(crate) fn traces(&self) -> &Traces {
        &self.0.world.traces
    }

    /// This rank's number in the world.
    pub(crate) fn world_rank(&self) -> usize {
        self.0.place.ranks[self.0.rank]
    }

    pub(super) fn fingerprint(&self) -> u64 {
        self.0.fingerprint.load(Ordering::Relaxed)
    }

    /// Returns this rank's GPU, if the group communicates by NCCL.
    pub fn gpu(&self) -> Option<Device> {
        Some(Device::Cuda(self.device_communicator()?.device()))
    }

    pub(crate) fn device_communicator(&self) -> Option<&DeviceCommunicator> {
        self.0.device.get()
    }

    pub(crate) fn set_device_communicator(
        &self,
        communicator: DeviceCommunicator,
    ) -> Result<(), DeviceCommunicator> {
        self.0.device.set(communicator)
    }

    /// Leaves a notice for all other ranks of the group.
    pub(super) fn notify(&self, (context, sequence): (u32, u64), problem: &str) {
        let from = self.0.place.ranks[self.rank()];
        let peers: Vec<usize> = self.0.place.ranks.iter().copied().filter(|&r| r != from).collect();
        let begun = if (context, sequence) == Notice::ALL { self.0.world.flight.begun() } else { Vec::new() };
        let notice =
            Notice { context, sequence, from, begun, problem: problem.into(), since: Instant::now() };
        self.0.world.backend.notify(&peers, &notice);
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, rank, size) = (self.name(), self.rank(), self.size());
        write!(f, "group \"{name}\" (rank {rank} of {size}, {})", self.backend())
    }
}

impl PartialEq for Group {
    /// Compares identity: groups of the same ranks may be different groups.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Group {}
