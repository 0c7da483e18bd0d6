//! Errors of collectives.

use std::time::Duration;

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Context of an error: the operation, the group, and this process's rank in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The operation's name, such as `all_gather_v`.
    pub operation: &'static str,
    /// The group's name.
    pub group: String,
    /// This process's rank in the group.
    pub rank: usize,
    /// The number of ranks in the group.
    pub size: usize,
    /// The operation's number in the order of the group's operations.
    pub sequence: u64,
}

impl std::fmt::Display for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { operation, group, rank, size, sequence } = self;
        write!(f, "{operation} (number {sequence} of group \"{group}\", rank {rank} of {size})")
    }
}

/// An error of a collective or of a group.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that cannot be. Nothing was sent; the group stays usable.
    #[error("{site}: {problem}")]
    Argument {
        /// Operation and group of the error.
        site: Site,
        /// Description of the error and the expected value.
        problem: String,
    },
    /// Another rank could not take part in this operation, and said why.
    #[error("{site}: rank {peer} of the world could not take part: {problem}")]
    Peer {
        /// Operation and group of the error.
        site: Site,
        /// The rank of the world that says so.
        peer: usize,
        /// True if the group has ended; otherwise the rank rejected this operation only, and the group stays usable.
        ended: bool,
        /// Message of that rank.
        problem: String,
    },
    /// The operation did not finish by the group's deadline. The group is dead from here on.
    #[error(
        "{site}: not finished after {} s: {} (the deadline is set by distributed.timeout_s)", after.as_secs_f64(),
        absent(missing, awaited)
    )]
    Timeout {
        /// Operation and group of the error.
        site: Site,
        /// Time that this rank waited.
        after: Duration,
        /// The ranks of the world that have not come, where that is known.
        missing: Vec<usize>,
        /// The ranks of the world whose messages have not arrived, where that is known. They may themselves wait for others.
        awaited: Vec<usize>,
    },
    /// An earlier failure ended this group.
    #[error("{site}: the group can no longer be used, since {cause}")]
    Dead {
        /// Operation and group of the error.
        site: Site,
        /// The failure that ended it.
        cause: String,
    },
    /// The transport below failed.
    #[error("{site}: {backend} failed: {problem}")]
    Backend {
        /// Operation and group of the error.
        site: Site,
        /// The backend's name.
        backend: &'static str,
        /// Message of that rank.
        problem: String,
    },
    /// A backend could not start.
    #[error("{backend} could not start: {problem}")]
    Start {
        /// The backend's name.
        backend: &'static str,
        /// Description of the error and its remedy.
        problem: String,
    },
    /// Ranks did not come to the start of a backend by the deadline.
    #[error(
        "{backend} could not start: rank {rank} of {size} timed out after {} s waiting for ranks {}; were they started, \
         with the same address and port? (the deadline is set by distributed.timeout_s)", after.as_secs_f64(), some_of(missing)
    )]
    Absent {
        /// The backend's name.
        backend: &'static str,
        /// This rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
        /// The ranks that are missing.
        missing: Vec<usize>,
        /// Time that this rank waited.
        after: Duration,
    },
    /// Another rank was lost, or could not be reached, while a backend started.
    #[error("{backend} could not start: {problem}")]
    LostAtStart {
        /// The backend's name.
        backend: &'static str,
        /// The failure, and the ranks between which it happened.
        problem: String,
    },
    /// An argument of a function of one rank that cannot be.
    #[error("{operation}: {problem}")]
    Input {
        /// The function's name.
        operation: &'static str,
        /// Description of the error and the expected value.
        problem: String,
    },
    /// libtorch refused an operation on a local tensor.
    #[error("libtorch: {0}")]
    Torch(String),
}

/// Describes the ranks that were missing at a deadline: those that have not come to the operation, or else those whose messages have not arrived.
fn absent(missing: &[usize], awaited: &[usize]) -> String {
    const CAUSES: &str = "a rank has ended, is stuck, or does not make the same calls in the same order";
    match (missing, awaited) {
        ([], []) => CAUSES.to_owned(),
        ([], awaited) => format!("{CAUSES}; this rank waits for ranks {} of the world", some_of(awaited)),
        ([rank], _) => format!("rank {rank} of the world has not come to it"),
        (ranks, _) => format!("ranks {} of the world have not come to it", some_of(ranks)),
    }
}

/// Lists ranks in ascending order, of many the first few or, if none is left out, the first and last: reports are cut.
fn some_of(ranks: &[usize]) -> String {
    const FEW: usize = 16;
    match (ranks, ranks.len().checked_sub(FEW)) {
        (_, None | Some(0)) => format!("{ranks:?}"),
        ([first, .., last], Some(_)) if last - first + 1 == ranks.len() => format!("{first} to {last}"),
        (_, Some(more)) => format!("{:?} and {more} more", &ranks[..FEW]),
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Error::Torch(error.to_string())
    }
}

impl From<isobar_torch::Error> for Error {
    fn from(error: isobar_torch::Error) -> Self {
        Error::Torch(error.to_string())
    }
}
