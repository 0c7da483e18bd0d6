//! Folder of a run, used by one run at a time, so that results of another are never lost by mistake.
//!
//! Rank 0 locks the folder while the run uses it ([`RunFolder::claim`]). The lock is the system's, on the file `run.lock`,
//! which names the process that has it: it ends with its process, however that ends. A folder that holds results of another
//! run is refused unless the new run resumes it or is told to replace it ([`CheckpointConfig::overwrite`]); then the old
//! results are kept in `earlier` until the new run has a checkpoint, and put back if it ends before.

mod earlier;
mod lock;

use std::path::{Path, PathBuf};
use std::time::Duration;

use isobar_collectives::Group;
use serde::{Deserialize, Serialize};

pub(crate) use self::earlier::Earlier;
use self::earlier::Recovered;
use self::lock::Lock;
use crate::config::{CheckpointConfig, Resume};
use crate::error::{Error, Result};
use crate::files;
use crate::folders::{CHECKPOINTS, EARLIER, any_in};
use crate::metrics;

/// The folder of a run, locked while this value lives.
///
/// ```
/// use std::time::Duration;
/// use isobar_collectives::Group;
/// use isobar_train::{Error, RunFolder};
///
/// let parent = tempfile::tempdir()?;
/// let path = parent.path().join("run");
/// let folder = RunFolder::claim(&path, &Group::single(), Duration::ZERO)?;
/// folder.write("notes.txt", b"batch 12 of the second campaign\n")?;
/// let second = RunFolder::claim(&path, &Group::single(), Duration::ZERO);
/// assert!(matches!(second, Err(Error::RunLocked { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Held by rank 0.
    lock: Option<Lock>,
    recovered: Option<Recovered>,
}

/// Result of rank 0, as sent to all ranks so that they report the same error.
#[derive(Debug, Serialize, Deserialize)]
enum Refusal {
    Locked { path: PathBuf, holder: String },
    HoldsResults { path: PathBuf, found: String },
    Failed(String),
}

impl RunFolder {
    /// Locks a folder, creates it if it is missing, and finishes what an interrupted run has left half done
    /// in it. Waits at most `wait` for another process that holds the lock, for example an earlier start of
    /// the same job. All ranks call; rank 0 takes the lock.
    ///
    /// On file systems without locks, it warns, and detects only other processes of the same host.
    ///
    /// # Errors
    ///
    /// On all ranks: [`Error::RunLocked`] where another process has the lock, with its host, number and time; a folder that
    /// cannot be written.
    pub fn claim(path: &Path, world: &Group, wait: Duration) -> Result<Self> {
        // The other ranks wait in a collective meanwhile.
        let wait = wait.min(world.deadline() / 2);
        let own = || -> Result<_> {
            let lock = Lock::take(path, wait)?;
            Ok((lock, earlier::recover(path)?))
        };
        let taken = decide(world, own)?;
        let (lock, recovered) = taken.map_or((None, None), |(lock, recovered)| (Some(lock), recovered));
        Ok(Self { path: path.to_owned(), lock, recovered })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a folder that holds results of another run, unless the run resumes them or was told to replace them. All ranks
    /// call.
    ///
    /// # Errors
    ///
    /// [`Error::HoldsResults`] on all ranks.
    pub fn check(&self, config: &CheckpointConfig, world: &Group) -> Result<()> {
        if config.resume != Resume::Never || config.overwrite {
            return Ok(());
        }
        decide(world, || self.refuse_results()).map(drop)
    }

    /// Writes a file of the run, in full or not at all. A link of that name is replaced, not followed.
    ///
    /// # Errors
    ///
    /// The error of the system.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        files::write_atomically(&self.path.join(name), bytes)
    }

    /// On rank 0: an error if the folder was removed or replaced while the run used it. Does not communicate.
    pub(crate) fn check_in_place(&self) -> Result<()> {
        match self.lock.as_ref().map_or(Ok(true), Lock::in_place)? {
            true => Ok(()),
            false => Err(Error::FolderGone { path: self.path.clone() }),
        }
    }

    /// Makes room for a run that starts from the beginning: moves results that are in the folder aside. All ranks call.
    pub(crate) fn begin(&self, config: &CheckpointConfig, world: &Group) -> Result<Option<Earlier>> {
        let own = || -> Result<Option<Earlier>> {
            if self.results()?.is_none() {
                return Ok(None);
            }
            // A run that was asked to resume and finds no checkpoint replaces the rest of an attempt of its own.
            if config.resume == Resume::Never && !config.overwrite {
                self.refuse_results()?;
            }
            let earlier = Earlier::set_aside(&self.path)?;
            tracing::warn!(
                "results of an earlier run in {0} are in {0}/{EARLIER} until this run has a checkpoint, and are removed then",
                self.path.display()
            );
            Ok(Some(earlier))
        };
        decide(world, own).map(Option::flatten)
    }

    /// Says what was done about an interrupted overwrite, and where locks do not work.
    pub(crate) fn log_state(&self) {
        let folder = self.path.display();
        if let Some(problem) = self.lock.as_ref().and_then(Lock::unsupported) {
            tracing::warn!(
                "the file system of {folder} has no locks ({problem}): a second run in it is noticed on this host only"
            );
        }
        match self.recovered {
            None => {}
            Some(Recovered::Removed) => {
                tracing::info!("removed what was left of an earlier run in {folder}/{EARLIER}");
            }
            Some(Recovered::PutBack) => tracing::warn!(
                "a run that was to replace the results in {folder} ended before its first checkpoint: they are back in their place"
            ),
        }
    }

    fn refuse_results(&self) -> Result<()> {
        match self.results()? {
            None => Ok(()),
            Some(found) => Err(Error::HoldsResults { path: self.path.clone(), found }),
        }
    }

    /// The results in the folder, in words. Logs, flight records and a configuration are none: a start that failed leaves them.
    fn results(&self) -> Result<Option<String>> {
        let mut found = Vec::new();
        if any_in(&self.path.join(CHECKPOINTS))? {
            found.push("checkpoints");
        }
        if metrics::any_in(&self.path)? {
            found.push("metrics");
        }
        Ok((!found.is_empty()).then(|| found.join(" and ")))
    }
}

/// Runs `own` on rank 0, and returns its error on all ranks. All ranks call; the others get `None`.
fn decide<T>(world: &Group, own: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    let mine = (world.rank() == 0).then(own);
    if world.size() == 1 {
        return mine.transpose();
    }
    let refusal = mine.as_ref().and_then(|mine| mine.as_ref().err()).map(|error| match error {
        Error::RunLocked { path, holder } => Refusal::Locked { path: path.clone(), holder: holder.clone() },
        Error::HoldsResults { path, found } => {
            Refusal::HoldsResults { path: path.clone(), found: found.clone() }
        }
        other => Refusal::Failed(other.to_string()),
    });
    let bytes = world.broadcast_bytes(&serde_json::to_vec(&refusal).unwrap_or_default(), 0)?;
    if let Some(mine) = mine {
        return mine.map(Some).map_err(|error| as_told(error, world));
    }
    let refusal: Option<Refusal> = serde_json::from_slice(&bytes).map_err(|error| {
        Error::invalid("rank 0's word on the run's folder", error, "this program's words")
    })?;
    match refusal {
        None => Ok(None),
        Some(Refusal::Locked { path, holder }) => Err(Error::RunLocked { path, holder }),
        Some(Refusal::HoldsResults { path, found }) => Err(Error::HoldsResults { path, found }),
        Some(Refusal::Failed(reason)) => {
            Err(Error::OtherRankFile { rank: 0, group: world.name().to_owned(), reason })
        }
    }
}

/// Rank 0's error as the other ranks have it, so that all ranks end alike.
fn as_told(error: Error, world: &Group) -> Error {
    match error {
        Error::RunLocked { .. } | Error::HoldsResults { .. } => error,
        other => Error::OtherRankFile { rank: 0, group: world.name().to_owned(), reason: other.to_string() },
    }
}
