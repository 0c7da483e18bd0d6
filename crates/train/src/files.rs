//! Files written under a temporary name, synced and renamed, so that no reader sees a partial file. Symbolic
//! links in the place of a run's files are replaced or rejected, never followed.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::fcntl::OFlag;

use crate::error::{IoContext, Result};

/// Makes an open fail where the last part of the path is a symbolic link.
pub(crate) fn no_follow(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(OFlag::O_NOFOLLOW.bits())
}

/// Creates a file, or empties the one that is there; an error where it is a symbolic link.
pub(crate) fn create(path: &Path) -> Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    no_follow(&mut options).open(path).at("create", path)
}

/// Removes a file, a folder with all that it holds, or a symbolic link, but not what the link points to.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = std::fs::symlink_metadata(path).and_then(|about| match about.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    });
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).at("remove", path),
        _ => Ok(()),
    }
}

/// Writes `bytes` to `path` whole or not at all.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let aside = aside(path);
    write_synced(&aside, bytes)?;
    std::fs::rename(&aside, path).at("rename a new file to", path)?;
    sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// Writes `path` and waits until it is on disk.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = create(path)?;
    file.write_all(bytes).at("write", path)?;
    file.sync_all().at("sync", path)
}

/// Waits until a folder's entries are on disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).at("sync", folder)
}

/// Waits until a folder's entries are on disk, and the first time also those of the folders above it: whoever made one of them
/// may not have waited for it. Those that cannot be read, as another user's may be, are passed over.
pub(crate) fn sync_folders(folder: &Path) -> Result<()> {
    static DONE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    sync_folder(folder)?;
    if let Ok(path) = folder.canonicalize()
        && DONE.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone())
    {
        path.ancestors().skip(1).for_each(|above| drop(sync_folder(above)));
    }
    Ok(())
}

/// Makes `path` hold `bytes`, atomically, and opens it to append more.
pub(crate) fn replace_and_append(path: &Path, bytes: &[u8]) -> Result<File> {
    write_atomically(path, bytes)?;
    no_follow(OpenOptions::new().append(true)).open(path).at("open", path)
}

/// The name beside `path` under which it is written first; the process number keeps two runs apart.
pub(crate) fn aside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}
