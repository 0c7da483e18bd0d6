//! Names of a run's folders, and lookup of its checkpoints.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, IoContext, Result};

/// Name of a run's folder of checkpoints.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

/// Name of the folder for the results of the earlier run.
pub(crate) const EARLIER: &str = "earlier";

/// The file that makes a folder a checkpoint.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Metadata file of checkpoints of versions before 3.
pub(crate) const METADATA_OF_OLD: &str = "metadata.json";

/// The folder of the checkpoint of a step.
pub(crate) fn step_folder(step: u64) -> String {
    format!("step_{step:08}")
}

/// Returns the step in a folder's name, if it is the name of a checkpoint.
pub(crate) fn step_of(folder: &Path) -> Option<u64> {
    folder.file_name()?.to_str()?.strip_prefix("step_")?.parse().ok()
}

/// The checkpoints in a folder, newest first: those with a manifest, whole or not, and those of earlier versions.
pub(crate) fn checkpoints(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<(u64, PathBuf)> = Vec::new();
    for (step, path) in steps(root)? {
        if has_manifest(&path)? {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found.into_iter().rev().map(|(_, path)| path).collect())
}

/// Returns whether a folder holds checkpoints, complete or not.
pub(crate) fn any_in(root: &Path) -> Result<bool> {
    Ok(!checkpoints(root)?.is_empty())
}

/// Returns whether a folder has a checkpoint's manifest. An I/O error, for example of a network file system, does not mean that it is
/// missing.
pub(crate) fn has_manifest(path: &Path) -> Result<bool> {
    let mut there = false;
    for name in [MANIFEST, METADATA_OF_OLD] {
        let file = path.join(name);
        there |= file.try_exists().at("look at", &file)? && file.is_file();
    }
    Ok(there)
}

/// Returns whether a folder has a checkpoint's manifest.
pub(crate) fn is_checkpoint(path: &Path) -> bool {
    [MANIFEST, METADATA_OF_OLD].iter().any(|name| path.join(name).is_file())
}

/// Returns whether a file's name in the folder of a checkpoint is one that saving creates.
pub(crate) fn is_of_checkpoint(name: &str) -> bool {
    let plain = name.strip_prefix('.').unwrap_or(name);
    plain.starts_with("rank_") || plain.starts_with(MANIFEST)
}

/// Folder of the checkpoints, given that folder or a run's.
pub(crate) fn root_of(path: &Path) -> PathBuf {
    checkpoints_of(path).unwrap_or_else(|| path.to_owned())
}

/// A run's folder of checkpoints, or that of the earlier run where the new one has none yet.
pub(crate) fn root_or_earlier(root: &Path) -> PathBuf {
    let run = root.parent().filter(|_| root.file_name().is_some_and(|name| name == CHECKPOINTS));
    run.and_then(checkpoints_of).unwrap_or_else(|| root.to_owned())
}

/// The checkpoints of a run: those of the earlier run while a new one that replaces it has none.
fn checkpoints_of(run: &Path) -> Option<PathBuf> {
    let inner = run.join(CHECKPOINTS);
    let aside = run.join(EARLIER).join(CHECKPOINTS);
    // What cannot be listed is not taken for empty: its error is reported where it is read.
    if any_in(&inner).is_ok_and(|any| !any) && any_in(&aside).unwrap_or(false) {
        return Some(aside);
    }
    std::fs::metadata(&inner).is_ok_and(|about| about.is_dir()).then_some(inner)
}

/// Returns the folders named after a step, with their steps.
pub(crate) fn steps(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    if !is_folder(root)? {
        return Ok(Vec::new());
    }
    let step = |name: &String| Some((name.strip_prefix("step_")?.parse().ok()?, root.join(name)));
    let mut found: Vec<(u64, PathBuf)> = Vec::new();
    for (step, path) in entries(root)?.iter().filter_map(step) {
        if is_folder(&path)? {
            found.push((step, path));
        }
    }
    Ok(found)
}

/// Returns whether a path is a folder. An I/O error, for example of a network file system, does not mean that it is missing.
fn is_folder(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(about) => Ok(about.is_dir()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error).at("look at", path),
    }
}

/// Returns the names of a folder's entries.
pub(crate) fn entries(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).at("list", folder)?;
    entries.map(|entry| Ok(entry.at("list", folder)?.file_name().to_string_lossy().into_owned())).collect()
}

/// The newest checkpoint of a folder, or the one that the folder is.
pub(crate) fn newest(path: &Path) -> Result<PathBuf> {
    if is_checkpoint(path) {
        return Ok(path.to_owned());
    }
    let root = root_of(path);
    checkpoints(&root)?.into_iter().next().ok_or_else(|| Error::no_checkpoint(&root))
}
