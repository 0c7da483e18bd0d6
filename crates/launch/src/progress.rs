//! Agreement between a rank and `isobar launch` about the progress bar.

use std::os::unix::fs::MetadataExt;

use crate::Environment;

/// Environment variable with the device and inode of the pipe from which `isobar launch`, on a terminal,
/// reads rank 0's progress records to draw a bar.
pub const LAUNCH_PROGRESS: &str = "ISOBAR_LAUNCH_PROGRESS";

/// Returns whether `isobar launch` reads this process's standard error and draws a progress bar from its
/// records. False if standard error was redirected.
///
/// ```
/// // Tests are not started by `isobar launch`.
/// assert!(!isobar_launch::draws_progress());
/// ```
#[must_use]
pub fn draws_progress() -> bool {
    let environment = Environment::from_process();
    let Some(told) = environment.get(LAUNCH_PROGRESS) else { return false };
    std::fs::metadata("/proc/self/fd/2").is_ok_and(|about| told == identity(&about))
}

/// Returns the value of [`LAUNCH_PROGRESS`] for a pipe.
#[must_use]
pub fn identity(about: &std::fs::Metadata) -> String {
    format!("{}:{}", about.dev(), about.ino())
}
