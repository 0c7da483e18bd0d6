//! Results of an earlier run, kept until the run that replaces them has a checkpoint.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::results::{self, UNFINISHED, exists, remove_if_empty};
use crate::error::{IoContext, Result};
use crate::files;
use crate::folders::{CHECKPOINTS, EARLIER, any_in};

/// Marker file in `earlier`: all results are there.
const COMPLETE: &str = ".complete";

/// Action taken on results that an interrupted overwrite had left in `earlier`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recovered {
    /// They were removed: the run that replaces them has a checkpoint.
    Removed,
    /// They were put back: the run that was to replace them ended before its first checkpoint.
    PutBack,
}

/// Results of an earlier run in `earlier`. If dropped before [`Earlier::remove`], they are moved back.
#[derive(Debug)]
pub(crate) struct Earlier {
    folder: PathBuf,
    removed: AtomicBool,
}

impl Earlier {
    /// Moves the results in `folder` aside.
    pub(super) fn set_aside(folder: &Path) -> Result<Self> {
        results::check_kinds(folder)?;
        let aside = folder.join(EARLIER);
        fs::create_dir_all(&aside).at("make the folder", &aside)?;
        let moved = || -> Result<()> {
            results::move_all(folder, &aside)?;
            files::write_synced(&aside.join(COMPLETE), b"")?;
            files::sync_folder(&aside)?;
            files::sync_folder(folder)
        };
        if let Err(error) = moved() {
            // The next start tries again where this fails, too.
            let _ = recover(folder);
            return Err(error);
        }
        Ok(Self { folder: folder.to_owned(), removed: AtomicBool::new(false) })
    }

    /// Removes them, once the new run has a checkpoint.
    pub(crate) fn remove(&self) -> Result<()> {
        match self.removed.swap(true, Ordering::SeqCst) {
            true => Ok(()),
            false => remove_aside(&self.folder),
        }
    }
}

impl Drop for Earlier {
    fn drop(&mut self) {
        if self.removed.load(Ordering::SeqCst) {
            return;
        }
        let folder = self.folder.display();
        match put_back(&self.folder) {
            Ok(()) => tracing::warn!(
                "the run ended before its first checkpoint: the results of the earlier run in {folder} are back, its own are in \
                 {folder}/{UNFINISHED}"
            ),
            Err(error) => tracing::warn!(
                "the run ended before its first checkpoint; the results of the earlier run are in {folder}/{EARLIER}, and the next \
                 start puts them back: {error}"
            ),
        }
    }
}

/// Finishes an overwrite that a killed run has left half done. The folder is locked.
pub(super) fn recover(folder: &Path) -> Result<Option<Recovered>> {
    let aside = folder.join(EARLIER);
    if !exists(&aside.join(COMPLETE)) && results::entries(&aside)?.is_empty() {
        return Ok(None);
    }
    if exists(&aside.join(COMPLETE)) && any_in(&folder.join(CHECKPOINTS))? {
        remove_aside(folder)?;
        return Ok(Some(Recovered::Removed));
    }
    put_back(folder)?;
    Ok(Some(Recovered::PutBack))
}

fn remove_aside(folder: &Path) -> Result<()> {
    let aside = folder.join(EARLIER);
    results::remove_all(&aside)?;
    files::remove(&aside.join(COMPLETE))?;
    remove_if_empty(&aside)
}

/// Moves the earlier results back, and those of the new run to `unfinished`. Can be repeated after an
/// interruption at any point.
fn put_back(folder: &Path) -> Result<()> {
    let aside = folder.join(EARLIER);
    let complete = aside.join(COMPLETE);
    if exists(&complete) {
        // Everything beside the folder is the new run's. Without the mark it may be the earlier run's.
        let unfinished = folder.join(UNFINISHED);
        fs::create_dir_all(&unfinished).at("make the folder", &unfinished)?;
        for entry in results::entries(folder)? {
            files::remove(&unfinished.join(entry))?;
        }
        results::move_all(folder, &unfinished)?;
        remove_if_empty(&unfinished)?;
        files::sync_folder(folder)?;
        files::remove(&complete)?;
        files::sync_folder(&aside)?;
    }
    results::move_all(&aside, folder)?;
    files::sync_folder(folder)?;
    remove_if_empty(&aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with a checkpoint and metrics, which say whose they are.
    fn results(folder: &Path, whose: &str) {
        let step = folder.join("checkpoints/step_00000001");
        fs::create_dir_all(&step).unwrap();
        fs::write(step.join("manifest.json"), whose).unwrap();
        fs::write(folder.join("metrics.jsonl"), whose).unwrap();
    }

    fn whose(folder: &Path) -> [String; 2] {
        ["checkpoints/step_00000001/manifest.json", "metrics.jsonl"]
            .map(|name| fs::read_to_string(folder.join(name)).unwrap_or_default())
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_dropped_is_put_back() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        results(run, "old");
        fs::write(run.join("notes"), "mine").unwrap();
        let earlier = Earlier::set_aside(run).unwrap();
        assert_eq!(names(run), ["earlier", "notes"]);
        fs::write(run.join("metrics.jsonl"), "new").unwrap();
        fs::write(run.join("metrics.csv"), "new").unwrap();
        drop(earlier);
        assert_eq!(whose(run), ["old", "old"]);
        assert_eq!(names(run), ["checkpoints", "metrics.jsonl", "notes", "unfinished"]);
        assert_eq!(names(&run.join("unfinished")), ["metrics.csv", "metrics.jsonl"]);
        assert_eq!(recover(run).unwrap(), None);
    }

    #[test]
    fn what_is_removed_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        results(folder.path(), "old");
        let earlier = Earlier::set_aside(folder.path()).unwrap();
        results(folder.path(), "new");
        earlier.remove().unwrap();
        drop(earlier);
        assert_eq!(whose(folder.path()), ["new", "new"]);
        assert_eq!(names(folder.path()), ["checkpoints", "metrics.jsonl"]);
    }

    /// Killed in the midst of any of these, a run leaves the old results or the new ones, and no mixture.
    #[test]
    fn whatever_was_interrupted_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        let aside = run.join(EARLIER);
        results(run, "old");
        // While moving aside: metrics are still here.
        fs::create_dir(&aside).unwrap();
        fs::rename(run.join(CHECKPOINTS), aside.join(CHECKPOINTS)).unwrap();
        assert_eq!(recover(run).unwrap(), Some(Recovered::PutBack));
        assert_eq!(
            (whose(run), names(run)),
            (["old", "old"].map(str::to_owned), vec!["checkpoints".to_owned(), "metrics.jsonl".to_owned()])
        );
        // Before the first checkpoint is whole.
        std::mem::forget(Earlier::set_aside(run).unwrap());
        fs::create_dir_all(run.join("checkpoints/step_00000003")).unwrap();
        fs::write(run.join("metrics.jsonl"), "new").unwrap();
        assert_eq!(recover(run).unwrap(), Some(Recovered::PutBack));
        assert_eq!(whose(run), ["old", "old"]);
        // While putting back, once the mark is gone.
        std::mem::forget(Earlier::set_aside(run).unwrap());
        fs::remove_file(aside.join(COMPLETE)).unwrap();
        fs::rename(aside.join("metrics.jsonl"), run.join("metrics.jsonl")).unwrap();
        assert_eq!(recover(run).unwrap(), Some(Recovered::PutBack));
        assert_eq!(whose(run), ["old", "old"]);
        // After the first checkpoint.
        std::mem::forget(Earlier::set_aside(run).unwrap());
        results(run, "new");
        assert_eq!(recover(run).unwrap(), Some(Recovered::Removed));
        assert_eq!(whose(run), ["new", "new"]);
        assert!(!aside.exists());
    }

    #[test]
    fn files_of_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (run, elsewhere) = (folder.path().join("run"), folder.path().join("elsewhere"));
        results(&run, "old");
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join("events"), "mine").unwrap();
        fs::create_dir(run.join(EARLIER)).unwrap();
        fs::write(run.join("earlier/notes"), "mine").unwrap();
        assert_eq!(recover(&run).unwrap(), None);
        std::os::unix::fs::symlink(&elsewhere, run.join("tensorboard")).unwrap();
        let error = Earlier::set_aside(&run).unwrap_err();
        assert!(error.to_string().contains("tensorboard is a symbolic link to a folder"), "{error}");
        fs::remove_file(run.join("tensorboard")).unwrap();
        std::os::unix::fs::symlink(elsewhere.join("events"), run.join("config.toml")).unwrap();
        Earlier::set_aside(&run).unwrap().remove().unwrap();
        assert_eq!(fs::read_to_string(run.join("earlier/notes")).unwrap(), "mine");
        assert_eq!(fs::read_to_string(elsewhere.join("events")).unwrap(), "mine");
        assert!(!exists(&run.join("config.toml")));
    }
}
