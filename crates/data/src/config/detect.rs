//! The format of data whose configuration names none.

use super::{DataConfig, FormatName};
use crate::joined::Opener;
use crate::registry::{Entry, find, registered};
use crate::{Error, Result};

/// The format that earlier versions took where none is named.
const FORMER: &str = "darcy";

impl DataConfig {
    /// Returns the name of the format: that of `format`, or the one that is detected. If none is, the data cannot be opened, and the
    /// name is `darcy`.
    ///
    /// Of HDF5 files, the first is opened to find its layout.
    pub fn format_name(&self) -> &str {
        if self.format == FormatName::default() {
            return self.detected().map_or(FORMER, |format| format.name());
        }
        // Earlier versions stored their default in the configuration of a run on a store of Zarr.
        match self.format.as_str() == FORMER && self.path.is_zarr() {
            true => "zarr",
            false => self.format.as_str(),
        }
    }

    /// Finds the format.
    ///
    /// # Errors
    /// A name that no format has, or a path that none reads; the error lists the formats.
    pub(super) fn found_format(&self) -> Result<Entry> {
        if self.format != FormatName::default() {
            return find(self.format_name());
        }
        self.detected().ok_or_else(|| match self.path.first() {
            Some(path) if !path.exists() => Error::Missing { path: path.to_owned() },
            _ => Error::Config(format!(
                "{}: its extension names no data format; --set data.format=NAME, with one of {}",
                self.path,
                registered().iter().map(Entry::name).collect::<Vec<_>>().join(", ")
            )),
        })
    }

    /// Detects the format: by the extension, and of those that share one, the first that opens a file, beginning with those that have
    /// a table in the configuration. If none does, the first one's error tells why.
    fn detected(&self) -> Option<Entry> {
        let mut candidates = self.path.formats();
        let has_table = |format: &Entry| self.own.names().any(|name| name == format.name());
        candidates.sort_by_key(|format| !has_table(format));
        match &candidates[..] {
            [] | [_] => candidates.first().copied(),
            [first, ..] => Some(*candidates.iter().find(|format| self.opens(format)).unwrap_or(first)),
        }
    }

    /// Returns whether a format opens the first file, with all its variables.
    fn opens(&self, format: &Entry) -> bool {
        let opener = Opener {
            format: *format,
            table: self.own.0.get(format.name()).cloned(),
            variables: Vec::new(),
            levels: Vec::new(),
            needs_time: false,
            keeps_missing: true,
            takes_all: true,
        };
        self.path.first_file(format).is_some_and(|file| opener.open(&file).is_ok())
    }
}
