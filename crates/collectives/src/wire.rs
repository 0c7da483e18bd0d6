//! Interface between the engine and the backends: tags, transfers, notices, and the trait [`Backend`].
//!
//! A backend does one thing: it starts a set of sends and receives between pairs of ranks of the world, without
//! waiting. Every collective of this crate is composed of such sets, once, for all backends, so that their results do
//! not depend on the backend: reductions add in rank order everywhere.

use std::time::{Duration, Instant};

use tch::Tensor;

use crate::local::memory::nbytes;

/// The kinds of backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// One rank, no communication.
    Single,
    /// Ranks that are threads of one process.
    Threads,
    /// MPI.
    Mpi,
    /// libtorch's gloo, over TCP.
    Gloo,
}

impl BackendKind {
    /// The name as configuration files and logs have it.
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Single => "single",
            BackendKind::Threads => "threads",
            BackendKind::Mpi => "mpi",
            BackendKind::Gloo => "gloo",
        }
    }
}

impl std::fmt::Display for BackendKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Memory that a backend sends and receives without a copy.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "MPI alone carries rows"))]
pub(crate) enum Carries {
    /// Tensors with any strides, whole.
    Strided,
    /// Contiguous tensors, and rows of strided ones where a row has at least so many bytes.
    Rows { at_least: usize },
    /// Contiguous tensors.
    Whole,
}

/// Marks which operation a message belongs to: two messages between the same ranks meet when their tags are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Tag {
    /// The group.
    pub(crate) context: u32,
    /// The operation's number in its group.
    pub(crate) sequence: u64,
    /// The step within the operation, below 8.
    pub(crate) step: u8,
}

impl Tag {
    /// The tag in `bits` bits: as much of the sequence as fits between context and step. Messages of equal tags keep
    /// their order, and the label of each holds the whole number: one that was never received, of a call that a rank
    /// refused, is told from a later one with the same tag.
    pub(crate) fn pack(self, bits: u32) -> i32 {
        let sequence = self.sequence & ((1 << (bits - CONTEXT_BITS - STEP_BITS)) - 1);
        ((u64::from(self.context) << (bits - CONTEXT_BITS)) | (sequence << STEP_BITS) | u64::from(self.step))
            as i32
    }
}

const CONTEXT_BITS: u32 = 10;
const STEP_BITS: u32 = 3;

/// The number of groups that may be made in one world.
pub(crate) const MAX_CONTEXTS: u32 = 1 << CONTEXT_BITS;

/// One side of a message.
#[derive(Debug)]
#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "MPI alone carries rows"))]
pub(crate) struct Transfer {
    /// The other side's rank in the world.
    pub(crate) peer: usize,
    /// Tensor that is read or written.
    pub(crate) tensor: Tensor,
    /// For a strided tensor over a backend that carries rows: where each row starts and how long it is, in bytes.
    pub(crate) rows: Option<Rows>,
    /// Digest of what both sides must agree on: operation, sequence number, dtype and shape.
    pub(crate) label: u64,
}

impl Transfer {
    /// The failure of a message that is not the one that belongs here.
    pub(crate) fn foreign(&self, sent: u64) -> Failure {
        let (kind, shape, bytes) = (self.tensor.kind(), self.tensor.size(), nbytes(&self.tensor));
        let another = match sent == bytes as u64 {
            true => " of another operation, argument, dtype, shape or layout",
            false => "",
        };
        Failure(format!(
            "rank {} of the world sent {sent} bytes{another}; this rank expects {kind:?} {shape:?}, {bytes} bytes; do all ranks \
             make the same call, with the same arguments, dtypes and shapes? (distributed.fingerprints=always names both calls \
             of a collective)",
            self.peer
        ))
    }
}

/// Rows of equal length in a tensor's memory.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "MPI alone carries rows"))]
pub(crate) struct Rows {
    pub(crate) offsets: Vec<usize>,
    pub(crate) bytes: usize,
}

/// A failure of a backend, in its own words.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Failure(pub(crate) String);

/// Message from a rank that cannot take part in an operation to the others of the group.
#[derive(Debug, Clone)]
pub(crate) struct Notice {
    pub(crate) context: u32,
    pub(crate) sequence: u64,
    /// The rank of the world that speaks.
    pub(crate) from: usize,
    /// Context of each group, and the number of operations that the rank had begun when it left. Only in a notice for all groups.
    pub(crate) begun: Vec<(u32, u64)>,
    pub(crate) problem: String,
    /// Time of arrival.
    pub(crate) since: Instant,
}

/// Grace period for operations in flight after a rank that takes part in them has left.
pub(crate) const UNDER_WAY: Duration = Duration::from_secs(2);

impl Notice {
    /// The context and the sequence of a notice that ends every operation of every group.
    pub(crate) const ALL: (u32, u64) = (u32::MAX, Self::LAST);

    /// The sequence of a notice that ends a group, all its operations and messages.
    pub(crate) const LAST: u64 = u64::MAX;

    /// A sequence that no operation has: only what ends the group concerns it.
    pub(crate) const NONE: u64 = u64::MAX - 1;

    /// Returns whether the group of whoever gets it has ended.
    pub(crate) fn ends_group(&self) -> bool {
        self.sequence == Self::LAST
    }

    pub(crate) fn concerns(&self, context: u32, sequence: u64) -> bool {
        match (self.context, self.sequence) == Self::ALL {
            true => !self.has_joined(context, sequence) || self.since.elapsed() > UNDER_WAY,
            false => self.context == context && (self.sequence == sequence || self.ends_group()),
        }
    }

    /// Returns whether the rank had begun this operation before it left, so that it may still finish here.
    fn has_joined(&self, context: u32, sequence: u64) -> bool {
        self.begun.iter().any(|&(of, begun)| of == context && sequence < begun)
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let begun = self.begun.iter().flat_map(|&(context, begun)| [u64::from(context), begun]);
        let head = [u64::from(self.context), self.sequence, self.from as u64, self.begun.len() as u64];
        let mut bytes: Vec<u8> = head.into_iter().chain(begun).flat_map(u64::to_le_bytes).collect();
        bytes.extend(self.problem.as_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |i: usize| Some(u64::from_le_bytes(bytes.get(8 * i..8 * i + 8)?.try_into().ok()?));
        let groups = usize::try_from(word(3)?).ok().filter(|&groups| groups <= bytes.len() / 16)?;
        let begun: Option<Vec<_>> =
            (0..groups).map(|i| Some((word(4 + 2 * i)? as u32, word(5 + 2 * i)?))).collect();
        Some(Self {
            context: word(0)? as u32,
            sequence: word(1)?,
            from: word(2)? as usize,
            begun: begun?,
            problem: String::from_utf8_lossy(bytes.get(8 * (4 + 2 * groups)..)?).into_owned(),
            since: Instant::now(),
        })
    }
}

/// Sends and receives under way. Dropped unfinished, it leaves its buffers to the backend.
pub(crate) trait Request: Send {
    /// Makes progress, and returns whether all transfers are complete.
    fn poll(&mut self) -> Result<bool, Failure>;

    /// Returns the ranks of the world from which a message has not arrived, as of the last poll. Empty if the backend does not know.
    fn awaited(&mut self) -> Vec<usize> {
        Vec::new()
    }
}

/// See the module's description.
pub(crate) trait Backend: Send + Sync {
    fn kind(&self) -> BackendKind;

    fn carries(&self) -> Carries;

    /// Starts all of `sends` and `receives`. A send's tensor is not to be changed, nor a receive's read, until the
    /// request is done. Between a pair of ranks, transfers of one tag meet in the order given.
    fn start(
        &self,
        tag: Tag,
        sends: Vec<Transfer>,
        receives: Vec<Transfer>,
    ) -> Result<Box<dyn Request>, Failure>;

    /// Leaves `notice` for `peers` (ranks of the world). Never waits, never fails.
    fn notify(&self, peers: &[usize], notice: &Notice);

    /// A notice that has come in for this operation.
    fn notice(&self, context: u32, sequence: u64) -> Option<Notice>;

    /// Gives the processor away for a moment, in the round of a wait with this number.
    fn idle(&self, _round: u32) {
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left() -> Notice {
        let (context, sequence) = Notice::ALL;
        let (problem, since) = ("no such file".to_owned(), Instant::now());
        Notice { context, sequence, from: 3, begun: vec![(0, 18), (7, 0)], problem, since }
    }

    #[test]
    fn notices_arrive_as_they_were() {
        let sent = left();
        let notice = Notice::from_bytes(&sent.to_bytes()).unwrap();
        assert_eq!((notice.context, notice.sequence, notice.from), (sent.context, sent.sequence, sent.from));
        assert_eq!((notice.begun, notice.problem), (sent.begun, sent.problem));
        // A number of groups that no message holds.
        let mut bytes = left().to_bytes();
        bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Notice::from_bytes(&bytes).is_none());
    }

    #[test]
    fn operations_that_a_rank_began_before_it_left_may_finish() {
        let mut notice = left();
        assert!(!notice.concerns(0, 17) && notice.concerns(0, 18));
        assert!(notice.concerns(7, 0) && notice.concerns(8, 0) && notice.concerns(0, Notice::NONE));
        notice.since = Instant::now().checked_sub(UNDER_WAY * 2).unwrap();
        assert!(notice.concerns(0, 17));
    }
}
