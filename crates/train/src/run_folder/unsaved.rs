//! Marker of a run without a checkpoint so far.

use std::path::{Path, PathBuf};

use super::earlier::Earlier;
use super::results::{UNSAVED, exists};
use crate::error::Result;
use crate::files;
use crate::folders::{CHECKPOINTS, any_in};

/// Content of the marker file.
const TEXT: &str = "The run in this folder has no checkpoint so far. Its next start replaces its results.\n";

/// A run that starts from the beginning, until its first checkpoint.
#[derive(Debug)]
pub(crate) struct Unsaved {
    folder: PathBuf,
    /// Results of an earlier run, which the first checkpoint replaces.
    earlier: Option<Earlier>,
}

impl Unsaved {
    /// Marks a folder, whose results were moved aside.
    pub(super) fn begin(folder: &Path, earlier: Option<Earlier>) -> Result<Self> {
        files::write_atomically(&folder.join(UNSAVED), TEXT.as_bytes())?;
        Ok(Self { folder: folder.to_owned(), earlier })
    }

    /// Removes the marker and the earlier results, once the run has a checkpoint. Can be repeated.
    pub(crate) fn end(&self) -> Result<()> {
        files::remove(&self.folder.join(UNSAVED))?;
        self.earlier.as_ref().map_or(Ok(()), Earlier::remove)
    }
}

/// Returns whether the run in a folder has no checkpoint so far.
pub(super) fn is_marked(folder: &Path) -> bool {
    exists(&folder.join(UNSAVED))
}

/// Removes the marker that a run has left if it was killed just after its first checkpoint. The folder is locked.
pub(super) fn recover(folder: &Path) -> Result<()> {
    match is_marked(folder) && any_in(&folder.join(CHECKPOINTS))? {
        true => files::remove(&folder.join(UNSAVED)),
        false => Ok(()),
    }
}
