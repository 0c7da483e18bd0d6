//! `main` of a program that runs on several ranks.

use std::error::Error;
use std::process::{ExitCode, Termination};

use isobar_torch::BoxError;

use crate::{ExitReason, report_error};

/// Runs the body of a program's `main`, and returns its exit code. An error is printed once for all ranks that
/// share it ([`report_error`]), and gives the exit code of its [`ExitReason`].
///
/// Every rank calls. `isobar_train::main` is the same with the exit codes of training. To end with a code of
/// your own without an error, return an [`ExitReason`] or an [`ExitCode`] from the body.
///
/// ```
/// use std::process::ExitCode;
///
/// use isobar_manager::{BoxError, DistributedManager};
///
/// fn main() -> ExitCode {
///     isobar_manager::main(run)
/// }
///
/// fn run() -> Result<(), BoxError> {
///     let manager = DistributedManager::initialize()?;
///     assert_eq!(manager.world_size(), 1);
///     Ok(DistributedManager::cleanup(true)?)
/// }
/// ```
///
/// A function with an error type of its own is called in a closure: `main(|| Ok(run()?))`.
pub fn main<T: Termination>(body: impl FnOnce() -> Result<T, BoxError>) -> ExitCode {
    main_with(body, |error| ExitReason::of(error).unwrap_or(ExitReason::Failed))
}

/// Does the work of [`main`] for a program that decides itself which error ends with which reason.
pub fn main_with<T: Termination>(
    body: impl FnOnce() -> Result<T, BoxError>,
    reason: impl FnOnce(&(dyn Error + 'static)) -> ExitReason,
) -> ExitCode {
    match body() {
        Ok(value) => value.report(),
        Err(error) => {
            report_error(&*error);
            reason(&*error).into()
        }
    }
}

impl Termination for ExitReason {
    fn report(self) -> ExitCode {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_exit_codes() {
        let code = |reason: ExitReason| format!("{:?}", ExitCode::from(reason));
        let run = |result: Result<ExitReason, crate::Error>| format!("{:?}", main(|| Ok(result?)));
        assert_eq!(run(Ok(ExitReason::Stopped)), code(ExitReason::Stopped));
        assert_eq!(format!("{:?}", main(|| Ok(()))), code(ExitReason::Good));
        assert_eq!(run(Err(crate::Error::Uninitialized)), code(ExitReason::Usage));
        let failed = main(|| Err::<(), _>("the moon is full".into()));
        assert_eq!(format!("{failed:?}"), code(ExitReason::Failed));
    }
}
