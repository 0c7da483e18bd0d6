//! Reasons for the end of a rank, and their exit codes.

use std::error::Error as StdError;
use std::process::ExitCode;

/// Reason for the end of a rank's process, which decides its exit code. `isobar` and programs that map their
/// errors with [`ExitReason::of`] use the same codes.
///
/// The root cause decides, not the order in which ranks notice it. When ranks issue different calls, the rank
/// that times out first and the ranks that it notifies all end as [`Lost`](Self::Lost).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExitReason {
    /// Success.
    Good = 0,
    /// A case or a threshold failed, or an error of no other kind.
    Failed = 1,
    /// A wrong command line or configuration.
    Usage = 2,
    /// Unusable data or checkpoint.
    Data = 3,
    /// A rank was lost or timed out.
    Lost = 4,
    /// Ranks disagree, for example about the configuration.
    Mismatch = 5,
    /// A run stopped on request, after writing a checkpoint if it had taken a step.
    Stopped = 6,
}

impl ExitReason {
    /// Returns the exit code.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Returns the reason of an error, if it or one of its causes is an error of this crate or of
    /// collectives.
    /// `isobar_train::exit_reason` knows the errors of all crates.
    ///
    /// ```
    /// use isobar_collectives::Error;
    /// use isobar_manager::ExitReason;
    ///
    /// let error = Error::Start { backend: "gloo", problem: "the port is taken".to_owned() };
    /// assert_eq!(ExitReason::of(&error), Some(ExitReason::Usage));
    /// assert_eq!(ExitReason::of(&std::fmt::Error), None);
    /// ```
    #[must_use]
    pub fn of(error: &(dyn StdError + 'static)) -> Option<Self> {
        let of_one = |cause: &(dyn StdError + 'static)| {
            (cause.downcast_ref().map(Self::of_collective))
                .or_else(|| cause.downcast_ref().map(Self::of_mesh))
                .or_else(|| cause.downcast_ref().map(Self::of_manager))
                .or_else(|| cause.is::<crate::config::ConfigError>().then_some(Self::Usage))
        };
        Self::of_chain(error, of_one)
    }

    /// Returns the reason of a chain of causes: a lost rank or a mismatch anywhere in the chain, else that of
    /// the first cause that has one.
    #[must_use]
    pub fn of_chain(
        error: &(dyn StdError + 'static),
        of_one: impl Fn(&(dyn StdError + 'static)) -> Option<Self>,
    ) -> Option<Self> {
        let mut first = None;
        let mut next = Some(error);
        while let Some(cause) = next {
            match of_one(cause) {
                between_ranks @ Some(Self::Lost | Self::Mismatch) => return between_ranks,
                reason => first = first.or(reason),
            }
            next = cause.source();
        }
        first
    }

    /// The reason of a collective's error.
    #[must_use]
    pub fn of_collective(error: &isobar_collectives::Error) -> Self {
        use isobar_collectives::Error;
        match error {
            // A rank that cannot continue counts as lost, whether the transport or the rank itself reports
            // it.
            Error::Timeout { .. }
            | Error::Dead { .. }
            | Error::Backend { .. }
            | Error::Absent { .. }
            | Error::LostAtStart { .. }
            | Error::Peer { ended: true, .. } => Self::Lost,
            Error::Argument { .. } | Error::Peer { ended: false, .. } => Self::Mismatch,
            Error::Start { .. } => Self::Usage,
            _ => Self::Failed,
        }
    }

    /// The reason of an error of meshes and groups.
    #[must_use]
    pub fn of_mesh(error: &isobar_mesh::Error) -> Self {
        use isobar_mesh::Error;
        match error {
            Error::Collective(inner) => Self::of_collective(inner),
            Error::Disagreement { .. } => Self::Mismatch,
            _ => Self::Usage,
        }
    }

    /// The reason of an error of this crate.
    #[must_use]
    pub fn of_manager(error: &crate::Error) -> Self {
        use crate::Error;
        match error {
            Error::Collective(inner) => Self::of_collective(inner),
            Error::Mesh(inner) => Self::of_mesh(inner),
            Error::ConfigurationsDiffer { .. } => Self::Mismatch,
            Error::Start { source, .. } => Self::of_collective(source),
            Error::FlightRecord { .. } => Self::Data,
            Error::RandomNumbers { .. } | Error::Signals { .. } | Error::Thread { .. } => Self::Failed,
            _ => Self::Usage,
        }
    }
}

impl From<ExitReason> for ExitCode {
    fn from(reason: ExitReason) -> Self {
        ExitCode::from(reason.code())
    }
}

#[cfg(test)]
mod tests {
    use isobar_collectives::Error::{Argument, Backend, LostAtStart, Peer, Start, Timeout};
    use isobar_collectives::Site;
    use rstest::rstest;

    use super::*;

    fn site() -> Site {
        Site { operation: "all_reduce", group: "data".to_owned(), rank: 0, size: 2, sequence: 7 }
    }

    fn said() -> String {
        "no space".to_owned()
    }

    /// Ranks that wait for each other end with the same code, whichever deadline passes first.
    #[rstest]
    #[case(Timeout { site: site(), after: std::time::Duration::from_secs(2), missing: vec![1], awaited: vec![] }, ExitReason::Lost)]
    #[case(Peer { site: site(), peer: 1, ended: true, problem: said() }, ExitReason::Lost)]
    #[case(Peer { site: site(), peer: 1, ended: false, problem: said() }, ExitReason::Mismatch)]
    #[case(Argument { site: site(), problem: said() }, ExitReason::Mismatch)]
    #[case(Backend { site: site(), backend: "gloo", problem: said() }, ExitReason::Lost)]
    #[case(LostAtStart { backend: "gloo", problem: said() }, ExitReason::Lost)]
    #[case(Start { backend: "gloo", problem: said() }, ExitReason::Usage)]
    fn collectives_have_reasons(#[case] error: isobar_collectives::Error, #[case] reason: ExitReason) {
        assert_eq!(ExitReason::of(&error), Some(reason));
        assert_eq!(ExitReason::of(&crate::Error::Collective(error)), Some(reason));
    }
}
