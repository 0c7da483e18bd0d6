//! HDF5 files written under a temporary name and renamed when they are complete.

use std::path::Path;

use hdf5_metno::File;
use isobar_files::NewFile;

use crate::{Error, Result};

/// An HDF5 file in the same folder as the one that it is to become: nobody ever sees half a file, and one that is not
/// finished leaves nothing behind.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    new: NewFile,
    file: File,
}

impl AtomicFile {
    pub(crate) fn create(target: &Path) -> Result<Self> {
        if let Some(folder) = target.parent()
            && !folder.as_os_str().is_empty()
            && !folder.is_dir()
        {
            return Err(Error::Missing { path: folder.to_owned() });
        }
        let new = NewFile::create(target).map_err(|error| Error::io(target, "create it", error))?;
        let file = File::create(new.path()).map_err(|error| Error::hdf5(target, "create it", error))?;
        Ok(Self { new, file })
    }

    pub(crate) fn target(&self) -> &Path {
        self.new.target()
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Puts the file in its place; its datasets must have been dropped.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { new, file } = self;
        let target = new.target().to_owned();
        file.close().map_err(|error| Error::hdf5(&target, "write it", error))?;
        new.finish().map_err(|error| Error::io(&target, "put the new file in its place", error))
    }
}
