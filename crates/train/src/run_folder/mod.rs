//! Folder of a run, used by one run at a time, so that results of another are never lost by mistake.
//!
//! Rank 0 locks the folder while the run uses it ([`RunFolder::claim`]). The lock is the system's, on the file `run.lock`,
//! which names the process that has it: it ends with its process, however that ends. A folder that holds results of another
//! run is refused unless the new run resumes it or is told to replace it ([`CheckpointConfig::overwrite`]); then the old
//! results are kept in `earlier` until the new run has a checkpoint, and put back if it ends before.
//!
//! A run without a checkpoint so far has the marker file `.unsaved`. Its next start begins again. Without the marker, results
//! without a complete checkpoint are those of a run whose checkpoints are missing or unreadable, and are never replaced unasked.

mod earlier;
mod lock;
mod results;
mod unsaved;

use std::path::{Path, PathBuf};
use std::time::Duration;

use isobar_collectives::Group;
use serde::{Deserialize, Serialize};

use self::earlier::{Earlier, Recovered};
use self::lock::Lock;
pub(crate) use self::unsaved::Unsaved;
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
    NothingToResume { path: PathBuf, found: String },
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
            let recovered = earlier::recover(path)?;
            unsaved::recover(path)?;
            Ok((lock, recovered))
        };
        let taken = decide(world, own)?;
        let (lock, recovered) = taken.map_or((None, None), |(lock, recovered)| (Some(lock), recovered));
        Ok(Self { path: path.to_owned(), lock, recovered })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of the run or of the checkpoint that keeps a file of this path, or would; the file need not exist.
    ///
    /// ```
    /// use std::time::Duration;
    /// use isobar_collectives::Group;
    /// use isobar_train::RunFolder;
    ///
    /// let parent = tempfile::tempdir()?;
    /// let path = parent.path().canonicalize()?.join("run");
    /// let _folder = RunFolder::claim(&path, &Group::single(), Duration::ZERO)?;
    /// assert_eq!(RunFolder::owner_of(&path.join("metrics.csv")), Some(path.clone()));
    /// assert_eq!(RunFolder::owner_of(&path.join("prediction.h5")), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn owner_of(path: &Path) -> Option<PathBuf> {
        results::owner(path)
    }

    /// Refuses a folder that holds results of another run, unless the run resumes them or was told to replace them. All ranks
    /// call.
    ///
    /// # Errors
    ///
    /// On all ranks: [`Error::HoldsResults`]; [`Error::NothingToResume`] for results whose checkpoints are missing or unreadable,
    /// also if the run is to resume.
    pub fn check(&self, config: &CheckpointConfig, world: &Group) -> Result<()> {
        if config.overwrite {
            return Ok(());
        }
        decide(world, || self.refuse_results(config)).map(drop)
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

    /// Makes room for a run that starts from the beginning: moves results that are in the folder aside, and marks the folder as one
    /// without a checkpoint. All ranks call; the others than rank 0 get `None`.
    pub(crate) fn begin(&self, config: &CheckpointConfig, world: &Group) -> Result<Option<Unsaved>> {
        let own = || -> Result<Unsaved> {
            self.refuse_results(config)?;
            let earlier = match self.results()? {
                None => None,
                Some(_) => {
                    let earlier = Earlier::set_aside(&self.path)?;
                    tracing::warn!(
                        "results of an earlier run in {0} are in {0}/{EARLIER} until this run has a checkpoint, and are removed then",
                        self.path.display()
                    );
                    Some(earlier)
                }
            };
            Unsaved::begin(&self.path, earlier)
        };
        decide(world, own)
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

    /// Refuses results that this run neither resumes nor replaces.
    fn refuse_results(&self, config: &CheckpointConfig) -> Result<()> {
        let Some(found) = self.results()?.filter(|_| !config.overwrite) else { return Ok(()) };
        let path = self.path.clone();
        if !any_in(&path.join(CHECKPOINTS))? && !unsaved::is_marked(&path) {
            return Err(Error::NothingToResume { path, found });
        }
        match config.resume {
            Resume::Never => Err(Error::HoldsResults { path, found }),
            Resume::Auto | Resume::Must => Ok(()),
        }
    }

    /// The results in the folder, in words. Logs, flight records and a configuration are none: a start that failed leaves them.
    fn results(&self) -> Result<Option<String>> {
        let mut found = Vec::new();
        if any_in(&self.path.join(CHECKPOINTS))? {
            found.push("checkpoints");
        } else if !unsaved::is_marked(&self.path) {
            found.extend(results::remains_of_checkpoints(&self.path)?);
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
        Error::NothingToResume { path, found } => {
            Refusal::NothingToResume { path: path.clone(), found: found.clone() }
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
        Some(Refusal::NothingToResume { path, found }) => Err(Error::NothingToResume { path, found }),
        Some(Refusal::Failed(reason)) => {
            Err(Error::OtherRankFile { rank: 0, group: world.name().to_owned(), reason })
        }
    }
}

/// Rank 0's error as the other ranks have it, so that all ranks end alike.
fn as_told(error: Error, world: &Group) -> Error {
    match error {
        Error::RunLocked { .. } | Error::HoldsResults { .. } | Error::NothingToResume { .. } => error,
        other => Error::OtherRankFile { rank: 0, group: world.name().to_owned(), reason: other.to_string() },
    }
}
