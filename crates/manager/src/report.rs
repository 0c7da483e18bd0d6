//! The error that ends a program of several ranks, printed once.

use std::error::Error;
use std::io::Write;

use crate::config::DistributedConfig;
use crate::environment::Environment;
use crate::launch::{Launch, detect, forced_method};
use crate::{DistributedManager, printable, start};

/// Seconds in which ranks that fail before they have joined the others join them to say so.
const JOIN_S: f64 = 10.0;

/// Characters of an error that are printed.
const LONGEST: usize = 8 << 10;

/// Prints an error that ends this process on standard error, once for all ranks that end with the same one, and tells the other
/// ranks. Call it last, on every rank that fails.
///
/// Rank 0 prints at once. The others tell rank 0 theirs and print it, with their rank, where rank 0 has not printed the same
/// text or a report about it. Ranks that have not joined each other yet, because a command line or a file was wrong, join
/// for this, within seconds; those that do not fail learn why they are alone. Where ranks cannot reach each other, or
/// `distributed.watchdog` is off, each prints its own. Each message is one write, so that lines of several ranks do not mix.
///
/// ```no_run
/// use std::process::ExitCode;
///
/// fn run() -> Result<(), Box<dyn std::error::Error>> {
///     let manager = isobar_manager::DistributedManager::initialize()?;
///     // train
///     Ok(isobar_manager::DistributedManager::cleanup(true)?)
/// }
///
/// fn main() -> ExitCode {
///     match run() {
///         Ok(()) => ExitCode::SUCCESS,
///         Err(error) => {
///             isobar_manager::report_error(&*error);
///             ExitCode::FAILURE
///         }
///     }
/// }
/// ```
pub fn report_error(error: &(dyn Error + 'static)) {
    let text = error_text(error);
    report_text(&format!("error: {}", printable(&text)), &text);
}

/// An error and its causes on one line; a cause that the error's own text ends with is not repeated.
#[must_use]
pub fn error_text(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.ends_with(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}

/// As [`report_error`], for an error that is text: `shown` is printed, and `text` is told to the other ranks.
pub fn report_text(shown: &str, text: &str) {
    let manager = DistributedManager::get().ok();
    let launch = if manager.is_none() { several() } else { None };
    let rank =
        manager.map(|manager| manager.rank()).or(launch.as_ref().map(|launch| launch.rank)).unwrap_or(0);
    if rank == 0 {
        print(shown);
    }
    if launch.is_some() && !DistributedManager::has_tried() {
        let config = DistributedConfig { timeout_s: JOIN_S, ..DistributedConfig::default() };
        // Ranks that cannot reach each other print each its own.
        let _ = DistributedManager::initialize_with(&config);
    }
    if !DistributedManager::leave(text) && rank > 0 {
        print(&format!("rank {rank} ({}): {shown}", start::host().trim()));
    }
}

/// What the launcher says of this process, where it has started several.
fn several() -> Option<Launch> {
    let environment = Environment::from_process();
    let launch = detect(&environment, forced_method(&environment).ok()?).ok()?;
    (launch.world_size != Some(1)).then_some(launch)
}

/// Writes a message to standard error at once.
fn print(text: &str) {
    let mut message: String = text.chars().take(LONGEST).collect();
    if message.len() < text.len() {
        message.push('…');
    }
    message.push('\n');
    let _ = std::io::stderr().lock().write_all(message.as_bytes());
}
