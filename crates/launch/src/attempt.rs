//! Number of the current attempt of a job, under a launcher that restarts its ranks.

use crate::Environment;
use crate::{LaunchError, Method};

/// The variable by which `isobar launch` names a job: the same at each attempt, another for each job.
pub const LAUNCH_ID: &str = "ISOBAR_LAUNCH_ID";

/// The variable that counts the attempts of a job, from 1.
pub const LAUNCH_ATTEMPT: &str = "ISOBAR_LAUNCH_ATTEMPT";

/// One start of all ranks of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The job.
    pub id: String,
    /// Its number, from 1.
    pub number: u32,
}

/// The attempt that this process is of; none where nothing says so.
///
/// ```
/// use isobar_launch::{Environment, attempt};
///
/// let variables = [("ISOBAR_LAUNCH_ID", "5f1c"), ("ISOBAR_LAUNCH_ATTEMPT", "2")];
/// let found = attempt(&Environment::from_iter(variables))?;
/// assert!(found.is_some_and(|attempt| attempt.number == 2)); // go on from the last checkpoint
/// # Ok::<(), isobar_launch::LaunchError>(())
/// ```
///
/// # Errors
///
/// A number that is none.
pub fn attempt(environment: &Environment) -> Result<Option<Attempt>, LaunchError> {
    let Some(id) = environment.get(LAUNCH_ID) else { return Ok(None) };
    let number = environment.get(LAUNCH_ATTEMPT).unwrap_or("1");
    match number.parse() {
        Ok(number) if number > 0 => Ok(Some(Attempt { id: id.to_owned(), number })),
        _ => Err(LaunchError::NotANumber {
            method: Method::Env,
            variable: LAUNCH_ATTEMPT,
            value: number.to_owned(),
            expected: "a number from 1",
        }),
    }
}
