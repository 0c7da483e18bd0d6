//! One operation of a group: its number, its place in traces and in the flight recorder, and the errors that it ends with.

use std::future::poll_fn;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tch::{Device, Tensor};

use crate::backend::nccl::DeviceCommunicator;
use crate::engine::awaited::Awaited;
use crate::engine::comparison::Comparison;
use crate::engine::group::{Direction, Group};
use crate::engine::outstanding::Outstanding;
use crate::error::{Error, Result, Site};
use crate::observe::flight::Recorded;
use crate::observe::trace::Entry;
use crate::wire::{Backend, Notice, Request, Tag, UNDER_WAY};

/// One operation of a group, from its beginning on.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) operation: &'static str,
    sequence: u64,
    pair: bool,
    /// The group's, when the operation began.
    pub(crate) fingerprint: u64,
    /// Digest of the arguments that all ranks give alike.
    arguments: Arc<AtomicU64>,
    group: Group,
    /// Entries in the attached traces.
    traced: Vec<Entry>,
    /// Entry in the flight recorder.
    pub(crate) recorded: Recorded,
    pub(crate) comparison: Arc<Comparison>,
    pub(crate) awaited: Arc<Awaited>,
}

/// The step that messages of pairs have, which collectives do not reach.
const PAIR_STEP: u8 = 7;

impl Group {
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
            arguments: Arc::default(),
            group: self.clone(),
            traced,
            recorded,
            comparison: Arc::default(),
            awaited: Arc::default(),
        }
    }

    /// An operation that stays on this rank: it has no number, and no other rank is told of it.
    pub(crate) fn local_call(&self, operation: &'static str) -> Call {
        Call {
            operation,
            sequence: 0,
            pair: true,
            fingerprint: 0,
            arguments: Arc::default(),
            group: self.clone(),
            traced: vec![],
            recorded: Recorded::NOWHERE,
            comparison: Arc::default(),
            awaited: Arc::default(),
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
            arguments: Arc::default(),
            group: self.clone(),
            traced,
            recorded,
            comparison: Arc::default(),
            awaited: Arc::default(),
        }
    }
}

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

    /// Takes into account an argument that all ranks must give alike: a rank that gives another does not take this call's messages,
    /// nor do the others take its messages. Not for a message between two ranks, each of which names the other.
    pub(crate) fn agree_on(&self, argument: impl Hash) {
        if self.pair {
            return;
        }
        let mut hasher = DefaultHasher::new();
        (self.arguments(), argument).hash(&mut hasher);
        self.arguments.store(hasher.finish(), Ordering::Relaxed);
    }

    /// Returns the digest of the arguments that all ranks must give alike.
    pub(crate) fn arguments(&self) -> u64 {
        self.arguments.load(Ordering::Relaxed)
    }

    /// Returns the communicator of a device tensor that can be sent directly between devices.
    pub(crate) fn communicator_for(&self, tensor: &Tensor) -> Option<&DeviceCommunicator> {
        match tensor.device() {
            Device::Cuda(_) => self.group.device_communicator(),
            _ => None,
        }
    }

    /// Ends when the request is done.
    pub(crate) fn complete(
        &self,
        mut request: Box<dyn Request>,
    ) -> impl Future<Output = Result<()>> + Send + use<> {
        let call = self.clone();
        poll_fn(move |_| match request.poll() {
            Ok(false) => {
                if call.awaited.is_asked() {
                    call.awaited.add(&request.awaited());
                }
                Poll::Pending
            }
            Ok(true) => Poll::Ready(Ok(())),
            Err(failure) => Poll::Ready(Err(call.broken(failure.0))),
        })
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
        let error = Error::Timeout { site: self.site(), after, missing, awaited: self.awaited.ranks() };
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
