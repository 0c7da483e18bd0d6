//! Results of an earlier run, kept until the run that replaces them has a checkpoint.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, IoContext, Result};
use crate::files;
use crate::folders::{CHECKPOINTS, EARLIER, any_in};

/// Results of a run: files and folders that a new run would replace.
const RESULTS: [&str; 7] = [
    CHECKPOINTS,
    "metrics.jsonl",
    "metrics.csv",
    "tensorboard",
    "config.toml",
    "validation.png",
    "prediction.png",
];

/// Folder for the results of a run that ended before its first checkpoint.
const UNFINISHED: &str = "unfinished";

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
        for name in RESULTS {
            let path = folder.join(name);
            let kind = fs::symlink_metadata(&path).map(|about| about.file_type());
            if kind.is_ok_and(|kind| kind.is_symlink()) && path.is_dir() {
                return Err(Error::invalid(
                    path.display().to_string(),
                    "a symbolic link to a folder",
                    "a folder of the run's own, as a run does not replace what lies elsewhere; remove the link, or choose \
                     another name (--set run.name=NAME)",
                ));
            }
        }
        let aside = folder.join(EARLIER);
        fs::create_dir_all(&aside).at("make the folder", &aside)?;
        let moved = || -> Result<()> {
            for name in RESULTS {
                move_entry(&folder.join(name), &aside.join(name))?;
            }
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
    let ours = RESULTS.iter().chain([&COMPLETE]).any(|name| exists(&aside.join(name)));
    if !ours {
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
    for name in RESULTS.iter().chain([&COMPLETE]) {
        files::remove(&aside.join(name))?;
    }
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
        for name in RESULTS {
            let (from, to) = (folder.join(name), unfinished.join(name));
            if exists(&from) {
                files::remove(&to)?;
                move_entry(&from, &to)?;
            }
        }
        remove_if_empty(&unfinished)?;
        files::sync_folder(folder)?;
        files::remove(&complete)?;
        files::sync_folder(&aside)?;
    }
    for name in RESULTS {
        let (from, to) = (aside.join(name), folder.join(name));
        if exists(&from) && exists(&to) {
            let reason = std::io::Error::from(ErrorKind::AlreadyExists);
            return Err(reason)
                .at("put back the results of the earlier run, move one of both away from", &to);
        }
        move_entry(&from, &to)?;
    }
    files::sync_folder(folder)?;
    remove_if_empty(&aside)
}

/// Renames what is at `from`, if anything is. Links are moved as links.
fn move_entry(from: &Path, to: &Path) -> Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).at("move", from),
        _ => Ok(()),
    }
}

/// Removes a folder unless it holds files of somebody else.
fn remove_if_empty(folder: &Path) -> Result<()> {
    match fs::remove_dir(folder) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            Err(error).at("remove", folder)
        }
        _ => Ok(()),
    }
}

fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
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
