//! Stores: keys and their bytes, in a folder or in an object store.

use std::fmt::Debug;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::spare::buffer;

/// Bytes of a key to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    /// All of them, if they are no more than this.
    All(u64),
    /// Some of them: the first, and their number.
    Some(u64, u64),
    /// The last of them.
    Last(u64),
}

/// Keys and their bytes.
pub(super) trait Store: Debug + Send + Sync {
    /// Reads bytes of a key; `None` if there is no such key.
    fn read(&self, key: &str, span: Span) -> Result<Option<Vec<u8>>>;

    /// Number of bytes of a key; `None` if there is no such key.
    fn length(&self, key: &str) -> Result<Option<u64>>;

    /// Names of the folders in a folder, `""` for the root.
    fn folders(&self, folder: &str) -> Result<Vec<String>>;

    /// Number of chunks to read at a time.
    fn together(&self) -> usize {
        1
    }
}

/// A folder of the file system.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    /// The root without links: what is outside of it is refused.
    real: PathBuf,
}

impl Folder {
    pub(super) fn open(root: &Path) -> Result<Self> {
        let real = root.canonicalize()?;
        if !real.is_dir() {
            // As opening a file: a FIFO or device is named.
            isobar_files::open(&real)?;
            return Err(Error::new(ErrorKind::NotADirectory, "it is a file, expected the folder of a store"));
        }
        Ok(Self { root: root.to_owned(), real })
    }

    /// The file of a key, without links.
    fn resolve(&self, key: &str) -> Result<Option<PathBuf>> {
        match self.root.join(key).canonicalize() {
            Ok(real) if real.starts_with(&self.real) => Ok(Some(real)),
            Ok(_) => {
                Err(Error::new(ErrorKind::InvalidInput, "it leads out of the store, expected a file in it"))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Store for Folder {
    fn read(&self, key: &str, span: Span) -> Result<Option<Vec<u8>>> {
        let Some(path) = self.resolve(key)? else { return Ok(None) };
        let (start, length) = match span {
            Span::All(limit) => return isobar_files::read(path, limit).map(Some),
            Span::Some(start, length) => (start, length),
            Span::Last(length) => {
                let all = isobar_files::open(&path)?.metadata()?.len();
                let start = all.checked_sub(length).ok_or_else(|| short(all, length))?;
                (start, length)
            }
        };
        let file = isobar_files::open(path)?;
        let there = file.metadata()?.len();
        if start.checked_add(length).is_none_or(|end| end > there) {
            return Err(short(there, start.saturating_add(length)));
        }
        let mut bytes = buffer(length as usize)?;
        file.read_exact_at(&mut bytes, start)?;
        Ok(Some(bytes))
    }

    fn length(&self, key: &str) -> Result<Option<u64>> {
        let Some(path) = self.resolve(key)? else { return Ok(None) };
        Ok(Some(isobar_files::open(path)?.metadata()?.len()))
    }

    fn folders(&self, folder: &str) -> Result<Vec<String>> {
        let Some(path) = self.resolve(folder)? else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            // A link to a folder is followed, and refused if that is elsewhere.
            if kind.is_dir() || (kind.is_symlink() && entry.path().is_dir()) {
                names.extend(entry.file_name().into_string());
            }
        }
        names.sort();
        Ok(names)
    }
}

pub(super) fn short(there: u64, needed: u64) -> Error {
    Error::new(ErrorKind::UnexpectedEof, format!("it has {there} bytes, expected at least {needed}"))
}
