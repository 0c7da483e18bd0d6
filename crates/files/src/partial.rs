//! Outputs that are not complete: files and folders under temporary names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Temporary paths of this process.
static PATHS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Attempts to remove a folder that is written to meanwhile.
const ATTEMPTS: usize = 20;

/// Temporary file or folder of an output. While this value lives, [`remove_partial`] removes it.
///
/// ```
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join(".result.partial");
/// let partial = isobar_files::Partial::new(&path);
/// std::fs::write(&path, "half of it")?;
/// std::fs::rename(&path, folder.path().join("result"))?;
/// drop(partial);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the path is forgotten once this is dropped"]
pub struct Partial(PathBuf);

impl Partial {
    /// Registers a path.
    pub fn new(path: &Path) -> Self {
        PATHS.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned());
        Self(path.to_owned())
    }

    /// Registers the path that `create` makes, with what else it returns. [`remove_partial`] waits until it is registered: no process
    /// that is told to end in between leaves it behind.
    ///
    /// # Errors
    ///
    /// That of `create`.
    pub fn created<T, E>(create: impl FnOnce() -> Result<(PathBuf, T), E>) -> Result<(Self, T), E> {
        let mut paths = PATHS.lock().unwrap_or_else(PoisonError::into_inner);
        let (path, other) = create()?;
        paths.insert(path.clone());
        Ok((Self(path), other))
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        PATHS.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Removes all temporary files and folders of this process, for a process that ends at once. Paths that cannot be removed
/// stay.
pub fn remove_partial() {
    // Held, so that no output is begun meanwhile.
    let paths = PATHS.lock().unwrap_or_else(PoisonError::into_inner);
    for path in &*paths {
        let removes = || match path.symlink_metadata() {
            Ok(about) if about.is_dir() => std::fs::remove_dir_all(path).is_ok(),
            Ok(_) => std::fs::remove_file(path).is_ok(),
            Err(_) => true,
        };
        let _ = (0..ATTEMPTS).any(|_| removes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_complete_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(path(".store.partial/chunks")).unwrap();
        std::fs::write(path(".store.partial/chunks/0"), "").unwrap();
        std::fs::write(path("other"), "").unwrap();
        let _store = Partial::new(&path(".store.partial"));
        drop(Partial::new(&path("other")));
        crate::write(path("complete"), "all of it").unwrap();
        let _begun = crate::NewFile::create(path("begun")).unwrap();
        remove_partial();
        let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["complete", "other"]);
    }
}
