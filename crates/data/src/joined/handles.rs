//! Data sets that are opened when they are needed; a bounded number of them is open.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::dataset::Dataset;
use crate::registry::{DataSource, Entry};
use crate::{Error, Result};

/// Arguments with which a format opens a file again.
#[derive(Debug, Clone)]
pub(crate) struct Opener {
    pub(crate) format: Entry,
    /// The table `[data.<format>]`.
    pub(crate) table: Option<Value>,
    pub(crate) variables: Vec<String>,
    pub(crate) levels: Vec<f64>,
    pub(crate) needs_time: bool,
    pub(crate) keeps_missing: bool,
    pub(crate) takes_all: bool,
}

impl Opener {
    /// Opens one file or folder.
    ///
    /// # Errors
    /// Those of the format.
    pub(crate) fn open(&self, path: &Path) -> Result<Box<dyn Dataset>> {
        let mut source = DataSource::new(path)
            .with_variables(&self.variables)
            .with_time(self.needs_time)
            .with_levels(&self.levels)
            .with_missing(self.keeps_missing);
        if self.takes_all {
            source = source.with_all_variables();
        }
        self.format.open(&source, self.table.as_ref())
    }
}

/// The files of a joined data set, of which those used last are open.
#[derive(Debug)]
pub(super) struct Handles {
    opener: Opener,
    files: Vec<File>,
    most: usize,
    /// Files that are open, those used last behind.
    open: Mutex<VecDeque<(usize, Arc<dyn Dataset>)>>,
}

/// A file, and what it had when it was opened first.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) samples: usize,
    pub(super) frames: Option<usize>,
}

impl File {
    pub(super) fn of(path: PathBuf, data: &dyn Dataset) -> Self {
        Self { path, samples: data.samples(), frames: data.times().map(<[f64]>::len) }
    }
}

impl Handles {
    /// `most` files stay open, at least one; besides them those that are being read by several threads.
    pub(super) fn new(opener: Opener, files: Vec<File>, most: usize) -> Self {
        Self { opener, files, most: most.max(1), open: Mutex::default() }
    }

    /// Paths of the files.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| &*file.path)
    }

    /// Opens a file, if it is not open.
    ///
    /// # Errors
    /// Those of the format, and a file that has other samples or frames than before.
    pub(super) fn get(&self, at: usize) -> Result<Arc<dyn Dataset>> {
        if let Some(open) = self.used(at) {
            return Ok(open);
        }
        let file = self.files.get(at).ok_or_else(|| Error::OutOfRange {
            what: "file".to_owned(),
            asked: at.to_string(),
            available: self.files.len(),
        })?;
        // Without the lock: other threads go on with other files.
        let data: Arc<dyn Dataset> = Arc::from(self.opener.open(&file.path)?);
        let found = (data.samples(), data.times().map(<[f64]>::len));
        if found != (file.samples, file.frames) {
            return Err(Error::Layout {
                path: file.path.clone(),
                name: "the file".to_owned(),
                found: format!("of {} samples and {} frames now", found.0, found.1.unwrap_or(1)),
                expected: format!(
                    "{} samples and {} frames, as at the start: it was changed",
                    file.samples,
                    file.frames.unwrap_or(1)
                ),
            });
        }
        let closed = {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            open.push_back((at, Arc::clone(&data)));
            let most = open.len().saturating_sub(self.most);
            open.drain(..most).collect::<Vec<_>>()
        };
        drop(closed);
        Ok(data)
    }

    /// A file that is open, which becomes the one used last.
    fn used(&self, at: usize) -> Option<Arc<dyn Dataset>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let place = open.iter().position(|(own, _)| *own == at)?;
        let handle = open.remove(place)?;
        let data = Arc::clone(&handle.1);
        open.push_back(handle);
        Some(data)
    }

    /// Number of files that are open.
    #[cfg(test)]
    pub(super) fn open_files(&self) -> usize {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
