//! The formats that may read a path.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::paths::DataPath;
use crate::registry::{Entry, registered};

impl DataPath {
    /// Returns the formats that read files with the extension of the first path, or of the first such file in a folder: of HDF5 the
    /// layouts before the plain format. A store of Zarr may have any name.
    ///
    /// ```
    /// use isobar_data::DataPath;
    ///
    /// let names = |path: &str| -> Vec<&str> {
    ///     DataPath::from(path).formats().iter().map(|format| format.name()).collect()
    /// };
    /// assert_eq!(names("era5_*.nc"), ["netcdf"]);
    /// assert_eq!(names("run.h5"), ["darcy", "pdebench", "the_well", "hdf5"]);
    /// assert!(names("notes.txt").is_empty());
    /// ```
    pub fn formats(&self) -> Vec<Entry> {
        let mut formats = registered();
        let is_known =
            |own: &String| formats.iter().any(|format| format.extensions().contains(&own.as_str()));
        let of = |path: &Path| {
            let own = extension(path).filter(is_known);
            own.or_else(|| in_folder(path).as_deref().and_then(extension))
                .or_else(|| begins_as_hdf5(path).then(|| "h5".to_owned()))
        };
        let first = || self.first().map(first_match);
        let extension =
            if self.is_zarr() { Some("zarr".to_owned()) } else { first().as_deref().and_then(of) };
        formats.retain(|format| extension.as_deref().is_some_and(|own| format.extensions().contains(&own)));
        formats.sort_by_key(|format| format.name() == "hdf5");
        formats
    }

    /// Returns the first file that a format reads of the data set.
    pub(crate) fn first_file(&self, format: &Entry) -> Option<PathBuf> {
        let found = self.first().filter(|path| path.is_dir()).and_then(in_folder);
        found.or_else(|| self.files(format).ok()?.into_iter().next())
    }
}

/// Returns the first path that a pattern matches, or the path itself.
fn first_match(path: &Path) -> PathBuf {
    let found =
        path.to_str().filter(|text| text.contains(['*', '?', '['])).and_then(|text| glob::glob(text).ok());
    found.and_then(|mut all| all.find_map(Result::ok)).unwrap_or_else(|| path.to_owned())
}

/// Returns whether a file begins with HDF5's signature.
fn begins_as_hdf5(path: &Path) -> bool {
    let mut start = [0; 8];
    let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
    let read = is_file.then(|| isobar_files::open(path).and_then(|mut file| file.read_exact(&mut start)));
    read.is_some_and(|read| read.is_ok()) && start == *b"\x89HDF\r\n\x1a\n"
}

/// Returns a file of a folder of data, or of its folder `train`: the first whose extension is that of a format.
fn in_folder(folder: &Path) -> Option<PathBuf> {
    let known = registered();
    let fits = |file: &PathBuf| {
        let extension = extension(file);
        extension.is_some_and(|own| known.iter().any(|entry| entry.extensions().contains(&own.as_str())))
    };
    let listed = |folder: &Path| -> Vec<PathBuf> {
        let all = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let shown = all.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
        shown.map(|entry| entry.path()).collect()
    };
    listed(folder).into_iter().chain(listed(&folder.join("train"))).filter(fits).min()
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}
