//! Groups of ranks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::nccl::DeviceCommunicator;
use crate::backend::{Backend, BackendKind, MAX_CONTEXTS, Notice, Tag, UNDER_WAY, single::Single};
use crate::error::{Error, Result, Site};
use crate::fingerprint::{Comparison, Fingerprints};
use crate::flight::{Flight, Phase, Place, Recorded};
use crate::metadata;
use crate::trace::{Entry, Traces};
use crate::work::Outstanding;

/// An ordered set of ranks that communicate.
///
/// All ranks of a group make the same calls in the same order; each call has a number, and messages of different calls
/// never mix. A clone is the same group. Calls on one group come from one thread at a time.
///
/// A rank that refuses a call for its arguments tells the others, so that all get an error and the group stays usable.
/// A call that does not end by the deadline ends the group: later calls fail at once.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    /// Name, number and ranks, and how many operations were begun.
    place: Arc<Place>,
    rank: usize,
    deadline: Duration,
    /// Running digest of what the ranks have agreed on; part of each message's label.
    fingerprint: AtomicU64,
    /// Number of messages exchanged with each rank by `send` and `recv`, which are not collective.
    pairs: Mutex<HashMap<(usize, Direction), u64>>,
    failure: OnceLock<String>,
    /// Number of operations that a rank which left had begun, and the time it left. These operations may finish.
    spared: OnceLock<(u64, Instant)>,
    device: OnceLock<DeviceCommunicator>,
    world: Arc<World>,
}

/// State shared by all groups of a world.
struct World {
    backend: Box<dyn Backend>,
    next_context: AtomicU32,
    sent: AtomicU64,
    received: AtomicU64,
    operations: AtomicU64,
    outstanding: Outstanding,
    traces: Traces,
    flight: Flight,
    /// Which operations are compared.
    fingerprints: AtomicU8,
}

/// Which way a message of a pair goes.
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

    fn make(
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

    /// Why the group can no longer be used, where it cannot.
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

    /// The group of some of this group's ranks, in the order given; `None` on the others.
    ///
    /// All ranks of this group call, with the same name and ranks, and in the same order as their other calls: that is
    /// checked.
    ///
    /// # Errors
    ///
    /// A list that is empty, names a rank twice or one that there is not, or differs between ranks.
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Option<Group>> {
        let call = self.call("subgroup");
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if ranks.is_empty() || sorted.len() != ranks.len() || sorted.last().is_some_and(|&r| r >= self.size())
        {
            return Err(call.refuse(format!(
                "the ranks {ranks:?} of group \"{name}\" are not a list of different ranks below {}",
                self.size()
            )));
        }
        let mine = format!("{name} {ranks:?}");
        let (context, all) = self.agree_on_context(call.clone(), mine.as_bytes())?;
        if let Some(other) = all.iter().position(|theirs| theirs != mine.as_bytes()) {
            let theirs = String::from_utf8_lossy(&all[other]).into_owned();
            return Err(call.error(format!(
                "ranks ask for different groups: rank {} for \"{mine}\", rank {other} for \"{theirs}\"",
                self.rank()
            )));
        }
        Ok(self.member(name, ranks.to_vec(), context))
    }

    /// One group for each colour, of the ranks that give it, in the order of `key` and then of their ranks; `None`
    /// where `colour` is. As `MPI_Comm_split`.
    ///
    /// All ranks of this group call.
    ///
    /// # Errors
    ///
    /// A failed exchange.
    pub fn split(&self, name: &str, colour: Option<usize>, key: i64) -> Result<Option<Group>> {
        let call = self.call("split");
        let colour_code = colour.map_or(-1, |c| c as i64);
        let mine = [colour_code.to_le_bytes(), key.to_le_bytes()].concat();
        let (context, all) = self.agree_on_context(call.clone(), &mine)?;
        let mut members = Vec::with_capacity(all.len());
        for (rank, bytes) in all.iter().enumerate() {
            let word = |i: usize| {
                bytes.get(8 * i..8 * i + 8).and_then(|b| b.try_into().ok()).map(i64::from_le_bytes)
            };
            match (word(0), word(1)) {
                (Some(colour), Some(key)) => members.push((colour, key, rank)),
                _ => return Err(call.error(format!("rank {rank} makes another call than split"))),
            }
        }
        members.sort_unstable();
        if colour.is_none() {
            return Ok(None);
        }
        let ranks = members.iter().filter(|m| m.0 == colour_code).map(|m| m.2).collect();
        // The groups of different colours share no pair of ranks, and so may share the number.
        Ok(self.member(name, ranks, context))
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    ///
    /// A failed exchange, or a rank that does not come by the deadline.
    pub fn barrier(&self) -> Result<()> {
        metadata::all_gather(self.call("barrier"), &[])?.wait().map(drop)
    }

    /// Gathers a few bytes of host memory from every rank, in rank order. The lengths may differ.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A failed exchange.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        metadata::all_gather(self.call("all_gather_bytes"), bytes)?.wait()
    }

    /// The bytes of `root`, on every rank; the other ranks' are not looked at.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A root that is not a rank of the group, or a failed exchange.
    pub fn broadcast_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<u8>> {
        metadata::broadcast(self.call("broadcast_bytes"), bytes, root)?.wait()
    }

    /// Takes into account something that all ranks of the group know alike, such as the layout of a tensor: from the next call
    /// on, ranks that were told other things, or in another order, do not take each other's messages, but get an error.
    ///
    /// Does not communicate.
    pub fn agree_on(&self, digest: u64) {
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

    /// Which operations the ranks agree on.
    pub fn fingerprints(&self) -> Fingerprints {
        Fingerprints::of(self.0.world.fingerprints.load(Ordering::Relaxed))
    }

    /// Begins an operation.
    pub(crate) fn call(&self, operation: &'static str) -> Call {
        let sequence = self.0.place.begun.fetch_add(1, Ordering::Relaxed);
        self.0.world.operations.fetch_add(1, Ordering::Relaxed);
        let traced = self.0.world.traces.begin(operation, self.name(), sequence);
        let recorded = self.0.world.flight.begin(operation, &self.0.place, sequence, None);
        Call {
            operation,
            sequence,
            pair: false,
            fingerprint: self.fingerprint(),
            group: self.clone(),
            traced,
            recorded,
            comparison: Arc::default(),
        }
    }

    /// An operation that stays on this rank: it has no number, and no other rank is told of it.
    pub(crate) fn local_call(&self, operation: &'static str) -> Call {
        Call {
            operation,
            sequence: 0,
            pair: true,
            fingerprint: 0,
            group: self.clone(),
            traced: vec![],
            recorded: Recorded::NOWHERE,
            comparison: Arc::default(),
        }
    }

    /// Begins a message of a pair of ranks, numbered apart from the operations that all ranks join.
    pub(crate) fn pair_call(&self, operation: &'static str, peer: usize, direction: Direction) -> Call {
        let mut pairs = self.0.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let next = pairs.entry((peer, direction)).or_default();
        let sequence = *next;
        *next += 1;
        self.0.world.operations.fetch_add(1, Ordering::Relaxed);
        drop(pairs);
        let traced = self.0.world.traces.begin(operation, self.name(), sequence);
        let peer = self.ranks().get(peer).copied();
        let recorded = self.0.world.flight.begin(operation, &self.0.place, sequence, peer);
        Call {
            operation,
            sequence,
            pair: true,
            fingerprint: self.fingerprint(),
            group: self.clone(),
            traced,
            recorded,
            comparison: Arc::default(),
        }
    }

    /// Returns the traces attached to this group's world.
    pub(crate) fn traces(&self) -> &Traces {
        &self.0.world.traces
    }

    /// This rank's number in the world.
    pub(crate) fn world_rank(&self) -> usize {
        self.0.place.ranks[self.0.rank]
    }

    fn fingerprint(&self) -> u64 {
        self.0.fingerprint.load(Ordering::Relaxed)
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

    fn member(&self, name: &str, ranks: Vec<usize>, context: u32) -> Option<Group> {
        let rank = ranks.iter().position(|&r| r == self.rank())?;
        let ranks = ranks.into_iter().map(|r| self.0.place.ranks[r]).collect();
        Some(Self::make(name, ranks, rank, context, self.0.deadline, self.0.world.clone()))
    }

    /// A number for new groups that no group of any of these ranks has, and what each rank gave in `with`.
    fn agree_on_context(&self, call: Call, with: &[u8]) -> Result<(u32, Vec<Vec<u8>>)> {
        let next = &self.0.world.next_context;
        let mine = [&next.load(Ordering::Relaxed).to_le_bytes(), with].concat();
        let all = metadata::all_gather(call.clone(), &mine)?.wait()?;
        let mut context = 0;
        let mut rest = Vec::with_capacity(all.len());
        for bytes in all {
            let (head, tail) = bytes.split_at(bytes.len().min(4));
            let theirs = head.try_into().map_err(|_| call.error("a rank makes another call".into()))?;
            context = context.max(u32::from_le_bytes(theirs));
            rest.push(tail.to_vec());
        }
        if context >= MAX_CONTEXTS {
            return Err(call.error(format!(
                "more than {MAX_CONTEXTS} groups were made; make each group once and keep it"
            )));
        }
        next.store(context + 1, Ordering::Relaxed);
        Ok((context, rest))
    }

    fn notify(&self, (context, sequence): (u32, u64), problem: &str) {
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

/// One operation of a group, from its beginning on.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) operation: &'static str,
    sequence: u64,
    pair: bool,
    /// The group's, when the operation began.
    pub(crate) fingerprint: u64,
    group: Group,
    /// Entries in the attached traces.
    traced: Vec<Entry>,
    /// Entry in the flight recorder.
    pub(crate) recorded: Recorded,
    pub(crate) comparison: Arc<Comparison>,
}

/// The step that messages of pairs have, which collectives do not reach.
const PAIR_STEP: u8 = 7;

impl Call {
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.group.0.world.backend
    }

    /// The works that are under way, of all groups.
    pub(crate) fn outstanding(&self) -> &Outstanding {
        &self.group.0.world.outstanding
    }

    /// Returns the name of the operation that both sides of a message use.
    pub(crate) fn name_on_both_sides(&self) -> &'static str {
        if self.pair { "send and recv" } else { self.operation }
    }

    pub(crate) fn world_rank(&self, rank: usize) -> usize {
        self.group.0.place.ranks[rank]
    }

    /// Returns whether the ranks compare this operation before its data moves; the same on all ranks of the group. Windows are
    /// not compared, because ranks that neither send nor receive do not join them; the labels of their messages tell layouts
    /// apart.
    pub(crate) fn compares(&self) -> bool {
        !self.pair
            && !["fetch", "accumulate"].contains(&self.operation)
            && self.group.size() > 1
            && self.recorded.is_somewhere()
            && self.group.fingerprints().compares(self.sequence)
            && self.comparison.begin()
    }

    pub(crate) fn tag(&self, step: u8) -> Tag {
        let step = if self.pair { PAIR_STEP } else { step };
        Tag { context: self.group.0.place.context, sequence: self.sequence, step }
    }

    pub(crate) fn site(&self) -> Site {
        Site {
            operation: self.operation,
            group: self.group.name().into(),
            rank: self.group.rank(),
            size: self.group.size(),
            sequence: self.sequence,
        }
    }

    /// An error of this call's arguments that every rank finds by itself.
    pub(crate) fn error(&self, problem: String) -> Error {
        self.recorded.ended(Some(&problem));
        Error::Argument { site: self.site(), problem }
    }

    /// An error of this call's arguments; the other ranks are told, in case that they do not find it too.
    pub(crate) fn refuse(&self, problem: String) -> Error {
        if !self.pair {
            self.group.notify((self.group.0.place.context, self.sequence), &problem);
        }
        self.error(problem)
    }

    /// A failure of the transport. It ends the group, and the other ranks are told.
    pub(crate) fn broken(&self, problem: String) -> Error {
        let error = Error::Backend { site: self.site(), backend: self.group.backend().name(), problem };
        self.end(&error);
        error
    }

    /// The deadline has passed.
    pub(crate) fn late(&self, after: Duration) -> Error {
        let missing = self.comparison.missing().into_iter().map(|rank| self.world_rank(rank)).collect();
        let error = Error::Timeout { site: self.site(), after, missing };
        self.end(&error);
        error
    }

    /// The error of a group that an earlier call ended.
    pub(crate) fn check_alive(&self) -> Result<()> {
        match self.group.failure() {
            Some(_) if self.may_finish() => Ok(()),
            Some(cause) => Err(Error::Dead { site: self.site(), cause: cause.into() }),
            None => Ok(()),
        }
    }

    /// Returns whether the rank that ended the group had begun this operation before it left.
    fn may_finish(&self) -> bool {
        let spared = self.group.0.spared.get();
        spared.is_some_and(|(begun, since)| {
            !self.pair && self.sequence < *begun && since.elapsed() <= UNDER_WAY
        })
    }

    /// Returns the error that another rank has reported for this call.
    pub(crate) fn notice(&self) -> Option<Error> {
        let sequence = if self.pair { Notice::NONE } else { self.sequence };
        let notice = self.backend().notice(self.group.0.place.context, sequence)?;
        let ended = notice.ends_group();
        if ended {
            let begun = notice.begun.iter().find(|(of, _)| *of == self.group.0.place.context);
            if let Some((_, begun)) = begun {
                let _ = self.group.0.spared.set((*begun, notice.since));
            }
            let _ = self
                .group
                .0
                .failure
                .set(format!("rank {} of the world ended it: {}", notice.from, notice.problem));
            self.group.0.world.flight.troubled(&notice.problem);
        }
        self.recorded.ended(Some(&notice.problem));
        Some(Error::Peer { site: self.site(), peer: notice.from, ended, problem: notice.problem })
    }

    pub(crate) fn count(&self, sent: usize, received: usize) {
        self.group.0.world.sent.fetch_add(sent as u64, Ordering::Relaxed);
        self.group.0.world.received.fetch_add(received as u64, Ordering::Relaxed);
        self.traced.iter().for_each(|entry| entry.count(sent, received));
    }

    /// The operation has ended, or a part of it.
    pub(crate) fn ended(&self, error: Option<&Error>) {
        self.traced.iter().for_each(Entry::end);
        match error {
            None => self.recorded.ended(None),
            Some(error) => self.recorded.ended(Some(&error.to_string())),
        }
    }

    #[cfg(test)]
    pub(crate) fn traced(&self) -> &[Entry] {
        &self.traced
    }

    fn end(&self, error: &Error) {
        let text = error.to_string();
        self.recorded.ended(Some(&text));
        self.group.0.world.flight.troubled(&text);
        if self.group.0.failure.set(text.clone()).is_ok() {
            self.group.notify((self.group.0.place.context, Notice::LAST), &text);
        }
    }
}
