//! Folder of a run's checkpoints: names, contents, and remains of interrupted writes. Symbolic links are
//! followed for reading, never for removing or writing.

use std::path::{Path, PathBuf};

use super::manifest::{MANIFEST, METADATA_OF_OLD, Manifest};
use crate::error::{Error, IoContext, Result};
use crate::{files, run_folder};

/// The folder of the checkpoint of a step.
pub(super) fn step_folder(step: u64) -> String {
    format!("step_{step:08}")
}

/// Returns the step in a folder's name, if it is the name of a checkpoint.
pub(super) fn step_of(folder: &Path) -> Option<u64> {
    folder.file_name()?.to_str()?.strip_prefix("step_")?.parse().ok()
}

/// A rank's file of tensors. The suffix keeps those of a save apart from those of the checkpoint that it replaces.
pub(super) fn rank_file(rank: usize, suffix: &str) -> String {
    format!("rank_{rank:05}{suffix}.safetensors")
}

/// A rank's note that its file is written.
pub(super) fn note_file(rank: usize) -> String {
    format!("rank_{rank:05}.json")
}

/// The checkpoints in a folder, newest first: those with a manifest, whole or not, and those of earlier versions.
pub(super) fn checkpoints(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<(u64, PathBuf)> =
        steps(root)?.into_iter().filter(|(_, path)| is_checkpoint(path)).collect();
    found.sort();
    Ok(found.into_iter().rev().map(|(_, path)| path).collect())
}

/// Returns whether a folder holds checkpoints, complete or not.
pub(crate) fn any_in(root: &Path) -> Result<bool> {
    Ok(!checkpoints(root)?.is_empty())
}

/// Returns whether a folder has a checkpoint's manifest.
pub(super) fn is_checkpoint(path: &Path) -> bool {
    [MANIFEST, METADATA_OF_OLD].iter().any(|name| path.join(name).is_file())
}

/// Folder of the checkpoints, given that folder or a run's.
pub(super) fn root_of(path: &Path) -> PathBuf {
    run_folder::checkpoints_of(path).unwrap_or_else(|| path.to_owned())
}

/// A run's folder of checkpoints, or that of the earlier run where the new one has none yet.
pub(super) fn root_or_earlier(root: &Path) -> PathBuf {
    let run = root.parent().filter(|_| root.file_name().is_some_and(|name| name == run_folder::CHECKPOINTS));
    run.and_then(run_folder::checkpoints_of).unwrap_or_else(|| root.to_owned())
}

/// Removes what interrupted writes have left, but for `current`, which is being written.
pub(super) fn sweep(root: &Path, current: Option<&Path>) -> Result<()> {
    for (_, path) in steps(root)? {
        if Some(path.as_path()) == current || is_checkpoint(&path) || path.is_symlink() {
            continue;
        }
        // Somebody else's files are not for us to remove.
        if entries(&path)?.iter().all(|name| is_ours(name)) {
            std::fs::remove_dir_all(&path).at("remove", &path)?;
        }
    }
    Ok(())
}

/// Removes what a checkpoint's own folder holds besides what its manifest lists.
pub(super) fn tidy(folder: &Path, manifest: &Manifest) -> Result<()> {
    for name in entries(folder)? {
        let listed = name == MANIFEST || manifest.files.iter().any(|file| file.name == name);
        if !listed && is_ours(&name) {
            let path = folder.join(&name);
            std::fs::remove_file(&path).at("remove", &path)?;
        }
    }
    Ok(())
}

/// Removes a checkpoint; interrupted, it is none any more, rather than a torn one.
pub(super) fn remove(folder: &Path) -> Result<()> {
    if !folder.is_symlink() {
        for name in [MANIFEST, METADATA_OF_OLD] {
            files::remove(&folder.join(name))?;
        }
    }
    files::remove(folder)
}

/// Refuses to write a checkpoint behind a symbolic link.
pub(super) fn refuse_link(folder: &Path) -> Result<()> {
    match folder.is_symlink() {
        false => Ok(()),
        true => Err(Error::checkpoint(
            folder,
            "it is a symbolic link, and is not written through; remove the link",
        )),
    }
}

fn steps(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    if !root.is_dir() {
        return Ok(Vec::new());
    }
    let step = |name: &String| Some((name.strip_prefix("step_")?.parse().ok()?, root.join(name)));
    let found = entries(root)?.iter().filter_map(step).collect::<Vec<(u64, PathBuf)>>();
    Ok(found.into_iter().filter(|(_, path)| path.is_dir()).collect())
}

fn entries(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).at("list", folder)?;
    entries.map(|entry| Ok(entry.at("list", folder)?.file_name().to_string_lossy().into_owned())).collect()
}

/// Returns whether a name is one that saving creates.
fn is_ours(name: &str) -> bool {
    let plain = name.strip_prefix('.').unwrap_or(name);
    plain.starts_with("rank_") || plain.starts_with(MANIFEST)
}

/// The newest checkpoint of a folder, or the one that the folder is.
pub(super) fn newest(path: &Path) -> Result<PathBuf> {
    if is_checkpoint(path) {
        return Ok(path.to_owned());
    }
    let root = root_of(path);
    checkpoints(&root)?.into_iter().next().ok_or(Error::NoCheckpoint { path: root })
}
