//! Files and folders that a run keeps in its folder.

use std::fs;
use std::path::{Path, PathBuf};

use super::lock;
use crate::error::{Error, IoContext, Result};
use crate::files;
use crate::folders::{
    CHECKPOINTS, EARLIER, entries as names, is_checkpoint, is_of_checkpoint, step_of, steps,
};
use crate::metrics;

/// Folder for the results of a run that ended before its first checkpoint.
pub(super) const UNFINISHED: &str = "unfinished";

/// Marker file of a run without a checkpoint so far: its next start replaces its results.
pub(super) const UNSAVED: &str = ".unsaved";

/// Picture of `isobar predict`, which a prediction may replace.
const PREDICTION: &str = "prediction.png";

/// Result files of a run, which a new run replaces.
const FILES: [&str; 6] =
    ["metrics.jsonl", "metrics.csv", "config.toml", "validation.png", PREDICTION, UNSAVED];

/// Result folders of a run, each with the test for entries of the run. Other entries are of others, and stay.
const FOLDERS: [(&str, IsOfRun); 2] = [(CHECKPOINTS, is_checkpoint_of_run), ("tensorboard", is_event_file)];

type IsOfRun = fn(&Path) -> bool;

/// Files of a run that are not results.
const OTHERS: [&str; 3] = [lock::FILE, "statistics.json", "launch.json"];

/// Folders of a run whose contents are all of the run.
const RESERVED: [&str; 6] = [CHECKPOINTS, "tensorboard", EARLIER, UNFINISHED, "logs", "flight"];

/// Returns the results in a folder as paths relative to it.
pub(super) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for (name, is_of_run) in FOLDERS {
        let inner = folder.join(name);
        if fs::symlink_metadata(&inner).is_ok_and(|about| about.is_dir()) {
            let own = names(&inner)?.into_iter().filter(|entry| is_of_run(&inner.join(entry)));
            found.extend(own.map(|entry| Path::new(name).join(entry)));
        }
    }
    found.extend(FILES.iter().filter(|name| exists(&folder.join(name))).map(PathBuf::from));
    Ok(found)
}

/// Moves the results in `from` to `to`, which must have none of these. Links are moved as links.
pub(super) fn move_all(from: &Path, to: &Path) -> Result<()> {
    for entry in entries(from)? {
        let (source, target) = (from.join(&entry), to.join(&entry));
        if exists(&target) {
            let reason = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
            return Err(reason).at("move results of a run, move one of both away from", &target);
        }
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).at("make the folder", parent)?;
        }
        fs::rename(&source, &target).at("move", &source)?;
    }
    for (name, _) in FOLDERS {
        let (source, target) = (from.join(name), to.join(name));
        remove_if_empty(&source)?;
        for changed in [source, target].iter().filter(|path| path.is_dir()) {
            files::sync_folder(changed)?;
        }
    }
    Ok(())
}

/// Removes the results in a folder.
pub(super) fn remove_all(folder: &Path) -> Result<()> {
    entries(folder)?.iter().try_for_each(|entry| files::remove(&folder.join(entry)))?;
    FOLDERS.iter().try_for_each(|(name, _)| remove_if_empty(&folder.join(name)))
}

/// Rejects a file in the place of a folder of results, the reverse, and links to folders: a run does not replace what it
/// cannot have written.
pub(super) fn check_kinds(folder: &Path) -> Result<()> {
    let folders = FOLDERS.iter().map(|(name, _)| (name, true));
    for (name, is_folder) in FILES.iter().map(|name| (name, false)).chain(folders) {
        let path = folder.join(name);
        let Ok(about) = fs::symlink_metadata(&path) else { continue };
        let found = if about.is_symlink() && path.is_dir() {
            "a symbolic link to a folder"
        } else if is_folder && !about.is_dir() {
            "not a folder"
        } else if !is_folder && about.is_dir() {
            "a folder"
        } else {
            continue;
        };
        let expected = if is_folder { "a folder of the run's own" } else { "a file of the run's own" };
        return Err(Error::invalid(
            path.display().to_string(),
            found,
            format!(
                "{expected}: a run replaces only its own files; move it away, or choose another name (--set \
                 run.name=NAME)"
            ),
        ));
    }
    Ok(())
}

/// Describes remains of checkpoints that cannot be read: folders without a manifest, or something other than a folder.
pub(super) fn remains_of_checkpoints(folder: &Path) -> Result<Option<&'static str>> {
    let root = folder.join(CHECKPOINTS);
    if exists(&root) && !root.is_dir() {
        return Ok(Some("an entry `checkpoints` that is not a folder"));
    }
    for (_, path) in steps(&root)? {
        let is_part = |name: &String| is_of_checkpoint(name) && path.join(name).is_file();
        if !is_checkpoint(&path) && names(&path)?.iter().any(is_part) {
            return Ok(Some("parts of checkpoints without `manifest.json`"));
        }
    }
    Ok(None)
}

/// Returns the folder of the run or checkpoint whose file a path is, also if there is no file of that name so far.
pub(super) fn owner(path: &Path) -> Option<PathBuf> {
    let path = isobar_files::resolve(path)?;
    let name = path.file_name()?.to_str();
    let parent = path.parent()?;
    if is_checkpoint(parent) && name.is_some_and(is_of_checkpoint) {
        return Some(parent.to_owned());
    }
    let is_run = |folder: &Path| {
        folder.join(lock::FILE).is_file()
            || folder.join("config.toml").is_file() && folder.join(CHECKPOINTS).is_dir()
    };
    let is_file = |name: &str| name != PREDICTION && FILES.iter().chain(&OTHERS).any(|own| *own == name);
    if is_run(parent) && name.is_some_and(is_file) {
        return Some(parent.to_owned());
    }
    let is_reserved = |inner: &Path| {
        let name = inner.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| RESERVED.contains(&name)) && inner.parent().is_some_and(is_run)
    };
    path.ancestors().find(|inner| is_reserved(inner))?.parent().map(Path::to_owned)
}

/// Removes a folder unless it holds files of somebody else.
pub(super) fn remove_if_empty(folder: &Path) -> Result<()> {
    use std::io::ErrorKind::{DirectoryNotEmpty, NotADirectory, NotFound};
    match fs::remove_dir(folder) {
        Err(error) if !matches!(error.kind(), NotFound | NotADirectory | DirectoryNotEmpty) => {
            Err(error).at("remove", folder)
        }
        _ => Ok(()),
    }
}

pub(super) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Returns whether an entry of the folder of checkpoints is a checkpoint, or the remains of one.
fn is_checkpoint_of_run(path: &Path) -> bool {
    let is_own =
        || path.is_dir() && names(path).is_ok_and(|names| names.iter().all(|name| is_of_checkpoint(name)));
    step_of(path).is_some() && (path.is_symlink() || is_checkpoint(path) || is_own())
}

fn is_event_file(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(metrics::is_event_file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of the user next to a run's are none of the run's.
    #[test]
    fn files_of_a_run_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().canonicalize().unwrap().join("run");
        let step = folder.path().join("given/step_00000002");
        for path in [&run.join("checkpoints/step_00000001"), &step] {
            fs::create_dir_all(path).unwrap();
            fs::write(path.join("manifest.json"), "").unwrap();
        }
        assert_eq!(owner(&run.join("metrics.csv")), None, "no run so far");
        fs::write(run.join(lock::FILE), "").unwrap();
        std::os::unix::fs::symlink(&run, folder.path().join("link")).unwrap();
        for name in [
            "config.toml",
            "metrics.csv",
            "metrics.jsonl",
            "validation.png",
            "statistics.json",
            "run.lock",
            "checkpoints",
            "checkpoints/step_00000009/rank_00000.safetensors",
            "checkpoints/new.h5",
            "tensorboard/x/../y",
            "logs/rank_0.log",
        ] {
            assert_eq!(owner(&run.join(name)), Some(run.clone()), "{name}");
            assert_eq!(owner(&folder.path().join("link").join(name)), Some(run.clone()), "{name}");
        }
        for name in
            ["prediction.png", "prediction.h5", "stats.json", "predictions/metrics.csv", "../metrics.csv", ""]
        {
            assert_eq!(owner(&run.join(name)), None, "{name}");
        }
        assert!(owner(&step.join("manifest.json")).is_some_and(|owner| owner.ends_with("step_00000002")));
        assert_eq!(owner(&step.join("weights.safetensors")), None);
    }
}
