//! Files of a checkpoint, and remains of interrupted writes. Symbolic links are followed for reading, never for removing or
//! writing.

use std::path::Path;

use super::manifest::Manifest;
use crate::error::{Error, IoContext, Result};
use crate::files;
pub(super) use crate::folders::{
    MANIFEST, METADATA_OF_OLD, checkpoints, entries, has_manifest, is_checkpoint, is_of_checkpoint, newest,
    root_of, root_or_earlier, step_folder, step_of, steps,
};

/// A rank's file of tensors. The suffix keeps those of a save apart from those of the checkpoint that it replaces.
pub(super) fn rank_file(rank: usize, suffix: &str) -> String {
    format!("rank_{rank:05}{suffix}.safetensors")
}

/// A rank's note that its file is written.
pub(super) fn note_file(rank: usize) -> String {
    format!("rank_{rank:05}.json")
}

/// Removes what interrupted writes have left, but for `current`, which is being written.
pub(super) fn sweep(root: &Path, current: Option<&Path>) -> Result<()> {
    for (_, path) in steps(root)? {
        if Some(path.as_path()) == current || path.is_symlink() {
            continue;
        }
        let names = entries(&path)?;
        // The directory listing decides: looking at the manifest may fail for other reasons, such as an unavailable network file system.
        let is_written = names.iter().any(|name| [MANIFEST, METADATA_OF_OLD].contains(&name.as_str()));
        // Somebody else's files are not for us to remove.
        if !is_written && names.iter().all(|name| is_of_checkpoint(name)) {
            std::fs::remove_dir_all(&path).at("remove", &path)?;
        }
    }
    Ok(())
}

/// Removes what a checkpoint's own folder holds besides what its manifest lists.
pub(super) fn tidy(folder: &Path, manifest: &Manifest) -> Result<()> {
    for name in entries(folder)? {
        let listed = name == MANIFEST || manifest.files.iter().any(|file| file.name == name);
        if !listed && is_of_checkpoint(&name) {
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
