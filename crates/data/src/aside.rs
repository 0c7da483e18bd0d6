//! Files that are written aside and take their name when they are whole.

use std::path::{Path, PathBuf};

use hdf5_metno::File;
use tempfile::TempPath;

use crate::{Error, Result};

/// An HDF5 file in the same folder as the one that it is to become: nobody ever sees half a file, and one that is not
/// finished leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Aside {
    target: PathBuf,
    path: TempPath,
    file: File,
}

impl Aside {
    pub(crate) fn create(target: &Path) -> Result<Self> {
        let path = reserve(target)?;
        let file = File::create(&path).map_err(|error| Error::hdf5(target, "create it", error))?;
        Ok(Self { target: target.to_owned(), path, file })
    }

    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Puts the file in its place; its datasets must have been dropped.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { target, path, file } = self;
        file.close().map_err(|error| Error::hdf5(&target, "write it", error))?;
        std::fs::File::open(&path)
            .and_then(|file| file.sync_all())
            .map_err(|error| Error::io(&target, "write it to disk", error))?;
        path.persist(&target)
            .map_err(|error| Error::io(&target, "put the new file in its place", error.error))
    }
}

/// An empty file beside the target, removed when dropped.
fn reserve(target: &Path) -> Result<TempPath> {
    let Some(name) = target.file_name() else {
        return Err(Error::io(target, "create it", std::io::ErrorKind::IsADirectory.into()));
    };
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return Err(Error::Missing { path: folder.to_owned() });
    }
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".partial");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // What any new file has, less the umask: data sets are shared.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(folder).map_err(|error| Error::io(target, "create it", error))?;
    Ok(file.into_temp_path())
}
