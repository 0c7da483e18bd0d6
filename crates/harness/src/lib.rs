//! Helpers for the tests of all crates and for `cargo xtask`: launches of programs on several ranks under a real launcher,
//! each with a deadline ([`Launch`]), two hosts on one machine ([`Hosts`]), a SLURM of one machine or two hosts ([`Slurm`]),
//! reports of skipped tests ([`skip`]), and comparisons of training runs ([`curve`]).
//!
//! It depends on no tensor library, and on no Isobar crate except `features`, `launch` and `rendezvous`, so that all other crates can
//! use it in tests.

pub mod curve;
mod hosts;
mod launch;
mod memo;
mod mounts;
mod process;
mod room;
mod slurm;

use std::{env, fs::OpenOptions, io::Write, path::PathBuf, process::Command};

pub use hosts::Hosts;
pub use launch::{Exit, Launch, Outcome, RankOutput};
pub use memo::Memo;
pub use mounts::Mounts;
pub use process::{descendants, end_tree, on_path, output_within, wait_within};
pub use slurm::{Slurm, SlurmState};

/// Environment variable that names the file to which [`skip`] appends.
pub const SKIPS: &str = "XTASK_SKIPS";

/// Says that the calling test could not run, and why; the test then returns.
///
/// Under `cargo xtask test` the summary counts and lists it, since to `cargo test` it looks passed.
///
/// # Examples
///
/// ```no_run
/// if !std::path::Path::new("/dev/nvidia0").exists() {
///     isobar_harness::skip("no GPU");
///     return;
/// }
/// ```
///
/// # Panics
///
/// If the file of skips can't be written: a skip must not be lost.
pub fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or("unnamed test").to_owned();
    let line = format!("{test}: {}\n", reason.replace('\n', " "));
    let mut err = std::io::stderr();
    err.write_all(format!("skipped {line}").as_bytes()).unwrap_or(());
    if let Some(file) = env::var_os(SKIPS) {
        let written = OpenOptions::new()
            .create(true)
            .append(true)
            .open(PathBuf::from(&file))
            .and_then(|mut skips| skips.write_all(line.as_bytes()));
        assert!(written.is_ok(), "failed to note a skipped test in {}: {written:?}", file.display());
    }
}

/// Returns `cargo`, the one that runs this program if one does, without the variables that it sets for this program's package.
///
/// Build scripts watch some of them (that of `ring` does): with them cargo would compile such dependencies again, in the place of
/// those that other tests link at the same time.
///
/// ```
/// let output = isobar_harness::cargo().arg("--version").output()?;
/// assert!(output.status.success());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let is_of_package = |key: &str| key.starts_with("CARGO_PKG_") || key.starts_with("CARGO_MANIFEST_");
    for (key, _) in env::vars_os().filter(|(key, _)| is_of_package(&key.to_string_lossy())) {
        command.env_remove(key);
    }
    command
}

/// Environment variable for the number of threads that a rank computes with.
pub const THREADS: &str = "OMP_NUM_THREADS";

/// Returns the number of threads that ranks of tests compute with: `OMP_NUM_THREADS` where it is set, else 1.
///
/// `cargo xtask test --processors` runs numeric tests with several values.
#[must_use]
pub fn threads() -> String {
    env::var(THREADS).unwrap_or_else(|_| "1".to_owned())
}

/// The root of the workspace that this crate was built in.
pub fn workspace() -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::fs::canonicalize(root).unwrap_or_else(|_| PathBuf::from(root))
}
