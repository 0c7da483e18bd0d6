//! Files that are written aside, synced and renamed, so that no reader ever sees half of one.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::{IoContext, Result};

/// Writes `bytes` to `path` whole or not at all.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let aside = aside(path);
    write_synced(&aside, bytes)?;
    std::fs::rename(&aside, path).at("rename a new file to", path)?;
    sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// Writes `path` and waits until it is on disk.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).at("create", path)?;
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
    OpenOptions::new().append(true).open(path).at("open", path)
}

/// The name beside `path` under which it is written first; the process number keeps two runs apart.
pub(crate) fn aside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}
