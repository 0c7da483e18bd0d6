//! Checks of a job's environment before training: mixed-up launchers, ranks that share a GPU while others are free, more
//! threads than cores, clocks that differ, a folder that cannot hold the results.
//!
//! [`examine`] gathers the [`Facts`] of all ranks, so that all come to the same [`Report`]. The rules themselves are functions
//! of what was found: [`environment`] of one process's variables, [`findings`] of the facts of all ranks, [`disk_space`] of a
//! folder's disk. `isobar check` prints the report, and `isobar train` heeds it.
//!
//! A check reports and changes nothing.

mod environment;
mod facts;
mod folder;
mod memory;
mod rules;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::DistributedConfig;
use crate::{DistributedManager, Result};

pub use environment::environment;
pub use facts::{Facts, FolderFacts, StepFacts};
pub use memory::{Memory, memory};
pub use rules::{disk_space, findings};

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The job runs, and perhaps not as it was meant.
    Warning,
    /// The job would lose its results, or compute something else than it was meant to.
    Error,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Severity of the finding.
    pub severity: Severity,
    /// Description: the problem, its place, and the remedy.
    pub text: String,
}

impl Finding {
    pub(crate) fn warning(text: String) -> Self {
        Self { severity: Severity::Warning, text }
    }

    pub(crate) fn error(text: String) -> Self {
        Self { severity: Severity::Error, text }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Optional checks of [`examine`].
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The folder of the run, which is made if it is not there; ranks may name it by paths of their own.
    pub folder: Option<PathBuf>,
    /// True if clocks are compared even if all ranks are on one host.
    pub clocks: bool,
}

/// Findings; the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Facts of each rank.
    pub ranks: Vec<Facts>,
    /// Findings, the most severe first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The findings of a severity.
    pub fn of(&self, severity: Severity) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.severity == severity)
    }
}

/// Looks at the environment of all ranks. It costs two or three exchanges of a few bytes, and a file that is made and removed.
///
/// All ranks call, with the same options but for the folder's path.
///
/// ```
/// use isobar_manager::checks::{self, Severity};
/// use isobar_manager::config::DistributedConfig;
/// use isobar_manager::DistributedManager;
///
/// let manager = DistributedManager::initialize()?;
/// let report = checks::examine(&manager, &DistributedConfig::default(), &checks::Options::default())?;
/// assert_eq!(report.ranks.len(), 1);
/// assert_eq!(report.of(Severity::Error).count(), 0);
/// # DistributedManager::cleanup(false)?;
/// # Ok::<(), isobar_manager::Error>(())
/// ```
///
/// # Errors
///
/// A failed exchange.
pub fn examine(
    manager: &DistributedManager,
    config: &DistributedConfig,
    options: &Options,
) -> Result<Report> {
    let world = manager.group(None)?;
    let token = options.folder.as_deref().map(|folder| folder::Token::leave(&world, folder)).transpose()?;
    let mut own = Facts::of_process(manager, config)?;
    own.folder = token.as_ref().map(|token| token.look(manager.local_rank()));
    let told = world.all_gather_bytes(&own.to_bytes())?;
    let mut ranks: Vec<Facts> = told.iter().map(|bytes| Facts::from_bytes(bytes)).collect();
    // All have looked.
    drop(token);
    let several = ranks.iter().any(|rank| rank.host != own.host);
    if several || options.clocks {
        let ahead = facts::ahead_of_first(&world)?;
        let all = world.all_gather_bytes(&ahead.to_le_bytes())?;
        for (rank, bytes) in ranks.iter_mut().zip(all) {
            rank.clock_ahead_s = bytes.try_into().ok().map(f64::from_le_bytes);
        }
    }
    let mut findings = findings(&ranks);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(Report { ranks, findings })
}

/// The bytes that are free for this user on the disk of a folder; none where the system does not say.
#[must_use]
pub fn free_space(folder: &Path) -> Option<u64> {
    let disk = nix::sys::statvfs::statvfs(folder).ok()?;
    // Of file systems without such numbers all are zero.
    (disk.blocks() > 0).then(|| disk.blocks_available() * disk.fragment_size())
}
