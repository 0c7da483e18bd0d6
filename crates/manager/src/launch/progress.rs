//! Who draws the progress bar of a rank.

use std::os::unix::fs::MetadataExt;

use crate::environment::Environment;

/// The variable by which `isobar launch`, on a terminal, tells rank 0 that it draws a bar of the records that come through this
/// pipe: the pipe's device and inode.
pub const LAUNCH_PROGRESS: &str = "ISOBAR_LAUNCH_PROGRESS";

/// Whether `isobar launch` reads this process's standard error and draws a progress bar of the records in it. It does not where
/// standard error goes elsewhere, as behind a shell's redirection.
///
/// ```
/// // Tests are not started by `isobar launch`.
/// assert!(!isobar_manager::launch::draws_progress());
/// ```
#[must_use]
pub fn draws_progress() -> bool {
    let environment = Environment::from_process();
    let Some(told) = environment.get(LAUNCH_PROGRESS) else { return false };
    std::fs::metadata("/proc/self/fd/2").is_ok_and(|about| told == identity(&about))
}

/// A pipe's value of [`LAUNCH_PROGRESS`].
#[must_use]
pub fn identity(about: &std::fs::Metadata) -> String {
    format!("{}:{}", about.dev(), about.ino())
}
