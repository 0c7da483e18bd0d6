//! Writing of files that appear complete or not at all.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Error, ErrorKind, Result, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempPath;

use crate::{Partial, check_regular};

/// File that is written under a temporary name next to its target and renamed by [`NewFile::finish`]. No
/// reader sees a partial file; a file that is not finished is removed on drop, and by [`remove_partial`](crate::remove_partial).
///
/// The target must be absent or a regular file, so that a privileged program never replaces a device such as
/// `/dev/full`, and never writes through a symbolic link.
///
/// ```
/// use std::io::Write;
///
/// let folder = tempfile::tempdir()?;
/// let mut file = isobar_files::NewFile::create(folder.path().join("result.txt"))?;
/// file.file().write_all(b"42\n")?;
/// file.finish()?;
/// assert_eq!(std::fs::read(folder.path().join("result.txt"))?, b"42\n");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct NewFile {
    target: PathBuf,
    path: TempPath,
    file: File,
    /// For a process that is told to end.
    _partial: Partial,
}

impl NewFile {
    /// Creates the temporary file.
    ///
    /// # Errors
    ///
    /// The target is not a regular file, or has no name; its folder is missing or may not be written.
    pub fn create(target: impl AsRef<Path>) -> Result<Self> {
        let target = target.as_ref();
        let Some(name) = target.file_name() else { return Err(ErrorKind::IsADirectory.into()) };
        check_target(target)?;
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut prefix = OsString::from(".");
        prefix.push(name);
        let mut temporary = tempfile::Builder::new();
        // The default mode of new files, less the umask, so that others can read results.
        let _ = temporary.prefix(&prefix).suffix(".partial").permissions(Permissions::from_mode(0o666));
        let (partial, (file, path)) = Partial::created(|| {
            let parts = temporary.tempfile_in(folder)?.into_parts();
            Ok((parts.1.to_path_buf(), parts))
        })
        // The crate's error names the temporary file, which the user does not know.
        .map_err(|error: Error| {
            error.raw_os_error().map_or(Error::from(error.kind()), Error::from_raw_os_error)
        })?;
        Ok(Self { target: target.to_owned(), path, file, _partial: partial })
    }

    /// The file to write.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Its temporary name, for libraries that open files by name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name that it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Waits until the file is on disk and renames it to its target, replacing a regular file of that name.
    ///
    /// # Errors
    ///
    /// The disk is full; something other than a regular file has taken the target's name.
    pub fn finish(self) -> Result<()> {
        self.file.sync_all()?;
        check_target(&self.target)?;
        self.path.persist(&self.target).map_err(|error| error.error)
    }
}

/// Writes `bytes` to `target`, all or nothing: see [`NewFile`].
///
/// # Errors
///
/// Those of [`NewFile`].
pub fn write(target: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> Result<()> {
    let mut file = NewFile::create(target)?;
    file.file().write_all(bytes.as_ref())?;
    file.finish()
}

/// Opens a file to append to, which is made where it is missing. Does not block, and does not follow a symbolic link.
///
/// ```
/// use std::io::Write;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("log");
/// isobar_files::append(&path)?.write_all(b"one\n")?;
/// isobar_files::append(&path)?.write_all(b"two\n")?;
/// assert_eq!(std::fs::read(&path)?, b"one\ntwo\n");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// The path names something other than a regular file, or cannot be opened.
pub fn append(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    check_target(path)?;
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().create(true).append(true).custom_flags(flags).open(path)?;
    // The path may have changed since.
    check_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Rejects a target that exists and is not a regular file.
fn check_target(target: &Path) -> Result<()> {
    match std::fs::symlink_metadata(target) {
        Ok(found) => check_regular(found.file_type()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
