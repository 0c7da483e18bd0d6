//! Exit codes for errors of training.

use std::error::Error as StdError;
use std::process::{ExitCode, Termination};

use isobar_manager::ExitReason;

use crate::{BoxError, Error};

/// Returns the reason, and so the exit code, for an error that ends a rank. A lost rank or a mismatch between
/// ranks anywhere among the causes takes precedence, then the first cause of a known type, then
/// [`ExitReason::Failed`].
///
/// `isobar` exits with these codes. [`main`](crate::main) does the same for your own program.
#[must_use]
pub fn exit_reason(error: &(dyn StdError + 'static)) -> ExitReason {
    ExitReason::of_chain(error, of_one).unwrap_or(ExitReason::Failed)
}

/// Runs the body of a program's `main`, and returns its exit code: [`isobar_manager::main`] with the reasons of
/// [`exit_reason`]. Every rank calls.
///
/// ```
/// use std::process::ExitCode;
///
/// use isobar_train::BoxError;
///
/// fn main() -> ExitCode {
///     isobar_train::main(train)
/// }
///
/// fn train() -> Result<(), BoxError> {
///     // isobar_manager::DistributedManager::initialize()?, and training
///     Ok(())
/// }
/// ```
pub fn main<T: Termination>(body: impl FnOnce() -> Result<T, BoxError>) -> ExitCode {
    isobar_manager::main_with(body, exit_reason)
}

/// Errors that are transparent for those of a crate below hide these from the chain, so each is asked. What failed inside a
/// backward pass is the source of the pass's error.
fn of_one(cause: &(dyn StdError + 'static)) -> Option<ExitReason> {
    (cause.downcast_ref().and_then(train))
        .or_else(|| cause.downcast_ref().and_then(data))
        .or_else(|| cause.downcast_ref().and_then(model))
        .or_else(|| cause.downcast_ref().and_then(shard))
        .or_else(|| cause.downcast_ref().and_then(array))
        .or_else(|| ExitReason::of(cause))
}

/// An error of data is of its file, but for those of the tensors and random numbers below it.
fn data(error: &isobar_data::Error) -> Option<ExitReason> {
    use isobar_data::Error;
    match error {
        Error::Random(inner) => array(inner),
        Error::Tensor(_) | Error::Memory(_) => None,
        Error::Config(_) => Some(ExitReason::Usage),
        _ => Some(ExitReason::Data),
    }
}

fn shard(error: &isobar_shard::Error) -> Option<ExitReason> {
    use isobar_shard::Error;
    if let Some(error) = error.communication() {
        return Some(ExitReason::of_collective(error));
    }
    match error {
        Error::Mesh(inner) => Some(ExitReason::of_mesh(inner)),
        Error::Sharded { source, .. } => shard(source),
        Error::StateDict { .. } | Error::File { .. } => Some(ExitReason::Data),
        _ => None,
    }
}

/// An error of a sharded tensor that went through a method of `Array`.
fn array(error: &isobar_array::Error) -> Option<ExitReason> {
    match error {
        isobar_array::Error::Implementation(inner) => inner.downcast_ref().and_then(shard),
        _ => None,
    }
}

fn model(error: &isobar_models::Error) -> Option<ExitReason> {
    match error {
        isobar_models::Error::Config { .. } => Some(ExitReason::Usage),
        isobar_models::Error::Shard(inner) => shard(inner),
        _ => None,
    }
}

fn train(error: &Error) -> Option<ExitReason> {
    match error {
        Error::Collectives(inner) => Some(ExitReason::of_collective(inner)),
        Error::Shard(inner) => shard(inner),
        Error::ParametersDiffer { .. }
        | Error::SettingsDiffer { .. }
        | Error::CheckpointsDiffer { .. }
        | Error::SamplesDiffer { .. } => Some(ExitReason::Mismatch),
        Error::Invalid { .. }
        | Error::WrongGradients { .. }
        | Error::HostMemory { .. }
        | Error::RunLocked { .. }
        | Error::HoldsResults { .. }
        | Error::NothingToResume { .. } => Some(ExitReason::Usage),
        Error::Io { .. }
        | Error::FolderGone { .. }
        | Error::OtherRankFile { .. }
        | Error::DiskSpace { .. }
        | Error::Checkpoint { .. }
        | Error::CheckpointUnfit { .. }
        | Error::NoCheckpoint { .. }
        | Error::OptimizerState { .. }
        | Error::MetricsFile { .. } => Some(ExitReason::Data),
        Error::OtherRank { .. } | Error::PeersLost => Some(ExitReason::Lost),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use isobar_collectives::{Error as Collective, Site};
    use isobar_shard::Error as Shard;

    use super::*;

    fn lost() -> Collective {
        let group = "data".to_owned();
        let site = Site { operation: "all_reduce", group, rank: 0, size: 2, sequence: 7 };
        Collective::Backend { site, backend: "gloo", problem: "connection closed".to_owned() }
    }

    fn in_backward(error: impl Into<isobar_torch::BoxError>) -> Error {
        isobar_torch::Error::Closure { what: "a hook".to_owned(), error: error.into() }.into()
    }

    fn in_operator(source: Shard) -> Shard {
        Shard::Sharded { op: "roll".to_owned(), layouts: Vec::new(), source: Box::new(source) }
    }

    fn in_data(error: Shard) -> isobar_data::Error {
        isobar_data::Error::Random(error.into())
    }

    #[test]
    fn a_lost_rank_is_lost_whatever_meets_it() {
        let task = |error: isobar_data::Error| Error::Task { context: "the data", source: error.into() };
        let errors = [
            in_backward(lost()),
            in_backward(Error::from(lost())),
            in_backward(in_operator(lost().into())),
            in_operator(in_operator(lost().into())).into(),
            Error::from(isobar_array::Error::from(in_operator(lost().into()))),
            task(isobar_data::Error::from(isobar_array::Error::from(in_operator(lost().into())))),
            Shard::from(isobar_mesh::Error::from(lost())).into(),
            task(in_data(lost().into())),
            task(in_data(in_operator(lost().into()))),
        ];
        for error in errors {
            assert_eq!(exit_reason(&error), ExitReason::Lost, "{error:?}");
        }
    }

    #[test]
    fn other_causes_keep_their_codes() {
        let missing = isobar_data::Error::Missing { path: "x.h5".into() };
        assert_eq!(exit_reason(&missing), ExitReason::Data);
        let argument =
            Shard::from(isobar_array::Error::Argument { op: "roll", reason: "no dim 5".to_owned() });
        assert_eq!(exit_reason(&in_data(argument)), ExitReason::Failed);
        assert_eq!(exit_reason(&in_backward("the moon is full")), ExitReason::Failed);
    }
}
