//! Exit codes, and which error ends in which.

use std::fmt;
use std::process::ExitCode;

/// How the command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// All good.
    Good = 0,
    /// A case or a threshold failed.
    Failed = 1,
    /// A wrong command line or configuration.
    Usage = 2,
    /// Data or a checkpoint that cannot be used.
    Data = 3,
    /// A rank was lost or timed out.
    Lost = 4,
    /// The ranks do not agree.
    Mismatch = 5,
    /// A run was told to stop, and has left a checkpoint.
    Stopped = 6,
}

/// What the codes mean, for the help text.
pub(crate) const TABLE: &str = "\
Exit codes:
  0  good
  1  a case or a threshold failed, or an error of no other kind
  2  wrong command line or configuration
  3  data or a checkpoint that cannot be used
  4  a rank was lost or timed out
  5  the ranks do not agree on what they do
  6  a run was told to stop (SIGTERM, or SIGUSR1 to be queued again), and has left a checkpoint";

/// What a code means, in the words of the table.
pub(crate) fn meaning(code: u8) -> Option<&'static str> {
    let code = format!("{code}  ");
    TABLE.lines().find_map(|line| line.trim_start().strip_prefix(&code))
}

impl Exit {
    /// An error that ends the command so.
    pub(crate) fn because(self, why: impl fmt::Display) -> Ended {
        Ended { exit: self, why: why.to_string() }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// An error of the application itself, which knows its exit code.
#[derive(Debug)]
pub(crate) struct Ended {
    exit: Exit,
    why: String,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Ended {}

/// An error and its causes on one line.
pub(crate) fn text(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let part = cause.to_string();
        // Some errors repeat their cause in their own text.
        if !text.ends_with(&part) {
            text = format!("{text}: {part}");
        }
    }
    text
}

/// The exit that an error asks for: that of the first cause that is of a known kind.
pub(crate) fn of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(known).unwrap_or(Exit::Failed)
}

fn known(cause: &(dyn std::error::Error + 'static)) -> Option<Exit> {
    if let Some(ended) = cause.downcast_ref::<Ended>() {
        return Some(ended.exit);
    }
    if cause.is::<isobar_data::Error>() {
        return Some(Exit::Data);
    }
    if cause.is::<isobar_manager::config::ConfigError>() {
        return Some(Exit::Usage);
    }
    // Errors that are transparent for those of a crate below hide these from the chain, so each is asked. What failed
    // inside a backward pass is the source of the pass's error.
    (cause.downcast_ref().map(collective))
        .or_else(|| cause.downcast_ref().map(manager))
        .or_else(|| cause.downcast_ref().and_then(train))
        .or_else(|| cause.downcast_ref().and_then(model))
        .or_else(|| cause.downcast_ref().and_then(shard))
}

fn collective(error: &isobar_collectives::Error) -> Exit {
    use isobar_collectives::Error;
    match error {
        // Another rank that says it cannot go on is lost, however this one learns of it: by the transport or by its word.
        Error::Timeout { .. }
        | Error::Dead { .. }
        | Error::Backend { .. }
        | Error::Absent { .. }
        | Error::Peer { ended: true, .. } => Exit::Lost,
        Error::Argument { .. } | Error::Peer { ended: false, .. } => Exit::Mismatch,
        Error::Start { .. } => Exit::Usage,
        _ => Exit::Failed,
    }
}

fn manager(error: &isobar_manager::Error) -> Exit {
    use isobar_manager::Error;
    match error {
        Error::Collective(inner) => collective(inner),
        Error::Disagreement { .. } | Error::ConfigurationsDiffer { .. } => Exit::Mismatch,
        Error::Start { source, .. } => collective(source),
        Error::FlightRecord { .. } => Exit::Data,
        _ => Exit::Usage,
    }
}

fn shard(error: &isobar_shard::Error) -> Option<Exit> {
    match error {
        isobar_shard::Error::Communication(inner) => Some(collective(inner)),
        isobar_shard::Error::StateDict { .. } | isobar_shard::Error::File { .. } => Some(Exit::Data),
        _ => None,
    }
}

fn model(error: &isobar_models::Error) -> Option<Exit> {
    match error {
        isobar_models::Error::Config { .. } => Some(Exit::Usage),
        isobar_models::Error::Shard(inner) => shard(inner),
        _ => None,
    }
}

fn train(error: &isobar_train::Error) -> Option<Exit> {
    use isobar_train::Error;
    match error {
        Error::Collectives(inner) => Some(collective(inner)),
        Error::Shard(inner) => shard(inner),
        Error::ParametersDiffer { .. } | Error::CheckpointsDiffer { .. } => Some(Exit::Mismatch),
        Error::Invalid { .. } => Some(Exit::Usage),
        Error::Io { .. }
        | Error::Checkpoint { .. }
        | Error::CheckpointUnfit { .. }
        | Error::NoCheckpoint { .. }
        | Error::OptimizerState { .. }
        | Error::MetricsFile { .. } => Some(Exit::Data),
        Error::OtherRank { .. } | Error::PeersLost => Some(Exit::Lost),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use isobar_collectives::Site;
    use rstest::rstest;

    use super::*;

    fn peer(ended: bool) -> isobar_collectives::Error {
        let problem = "no space".to_owned();
        isobar_collectives::Error::Peer { site: site(), peer: 1, ended, problem }
    }

    fn site() -> Site {
        Site { operation: "all_reduce", group: "data".to_owned(), rank: 0, size: 2, sequence: 7 }
    }

    fn lost() -> isobar_collectives::Error {
        isobar_collectives::Error::Backend {
            site: site(),
            backend: "gloo",
            problem: "connection closed".to_owned(),
        }
    }

    fn in_backward(error: impl Into<isobar_torch::BoxError>) -> isobar_train::Error {
        isobar_torch::Error::Closure { what: "a hook".to_owned(), error: error.into() }.into()
    }

    #[test]
    fn a_rank_lost_inside_backward_is_lost() {
        for error in [in_backward(lost()), in_backward(isobar_train::Error::from(lost()))] {
            let error = anyhow::Error::from(error);
            assert_eq!(of(&error), Exit::Lost, "{error:?}");
            assert_eq!(text(&error).matches("connection closed").count(), 1, "{}", text(&error));
        }
        assert_eq!(of(&in_backward("the moon is full").into()), Exit::Failed);
    }

    #[test]
    fn codes_have_meanings() {
        assert_eq!(meaning(Exit::Lost as u8), Some("a rank was lost or timed out"));
        assert_eq!(meaning(7), None);
    }

    #[rstest]
    #[case(peer(true), Exit::Lost)]
    #[case(peer(false), Exit::Mismatch)]
    #[case(isobar_collectives::Error::Argument { site: site(), problem: "sizes".to_owned() }, Exit::Mismatch)]
    fn what_another_rank_says(#[case] error: isobar_collectives::Error, #[case] exit: Exit) {
        assert_eq!(of(&error.into()), exit);
    }
}
