//! `data.path`: a file, a folder, a pattern, or a list of them.

use std::cmp::Ordering;
use std::fmt;
use std::path::{Path, PathBuf};

use isobar_files::is_url;
use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::registry::{Entry, is_zarr_store};
use crate::{Error, Result};

/// Place of a data set: a file, a folder, a pattern such as `era5_*.nc`, or a list of them.
///
/// ```
/// use isobar_data::DataPath;
///
/// let one: DataPath = "era5_2010.nc".into();
/// let all: DataPath = serde_json::from_str(r#"["era5_19*.nc", "era5_2000.nc"]"#)?;
/// assert_eq!((one.to_string(), all.to_string()), ("era5_2010.nc".into(), "era5_19*.nc and 1 more".into()));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum DataPath {
    /// One path or pattern.
    One(PathBuf),
    /// Several.
    Many(Vec<PathBuf>),
}

// By hand: an untagged enum does not say what was expected.
impl<'de> Deserialize<'de> for DataPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wrong =
            || D::Error::custom("expected a path, a pattern such as \"data/*.nc\", or a list of them");
        match Value::deserialize(deserializer)? {
            Value::String(path) => Ok(Self::One(path.into())),
            Value::Array(paths) => {
                let path = |path: &Value| path.as_str().map(PathBuf::from).ok_or_else(wrong);
                Ok(Self::Many(paths.iter().map(path).collect::<Result<_, _>>()?))
            }
            _ => Err(wrong()),
        }
    }
}

impl<P: Into<PathBuf>> From<P> for DataPath {
    fn from(path: P) -> Self {
        Self::One(path.into())
    }
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths = self.paths();
        match paths {
            [] => f.write_str("no file"),
            [one] => one.display().fmt(f),
            [first, others @ ..] => write!(f, "{} and {} more", first.display(), others.len()),
        }
    }
}

impl DataPath {
    fn paths(&self) -> &[PathBuf] {
        match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Many(paths) => paths,
        }
    }

    /// The first path or pattern.
    pub(crate) fn first(&self) -> Option<&Path> {
        self.paths().first().map(PathBuf::as_path)
    }

    /// Returns whether one of the paths is empty.
    pub(crate) fn has_empty(&self) -> bool {
        self.paths().iter().any(|path| path.as_os_str().is_empty())
    }

    /// Returns whether the first path is a store of Zarr, whatever its name: a folder with its metadata, or one in an object store.
    pub fn is_zarr(&self) -> bool {
        let is_store = |path: &PathBuf| is_url(path) || is_zarr_store(path);
        self.paths().first().is_some_and(is_store)
    }

    /// The folder of a data set whose training, validation and test files are in the folders `train`, `valid` and `test`, as The
    /// Well's are: these three, of which the last two may be missing.
    pub(crate) fn split(&self, format: &Entry) -> Option<[Option<Self>; 3]> {
        let Self::One(path) = self else { return None };
        let part = |name: &str| Some(path.join(name)).filter(|part| part.is_dir());
        let train = part("train")?;
        if format.takes_folders() || !listed(path, format).ok()?.is_empty() {
            return None;
        }
        Some([Some(train), part("valid"), part("test")].map(|part| part.map(Self::One)))
    }

    /// The files of a data set of this format: one, or several that are joined. Patterns and folders give files sorted by name, with
    /// numbers in their order; a list keeps its own.
    ///
    /// # Errors
    /// A pattern without files, an empty list, a file that is named twice, a folder that cannot be listed.
    pub(crate) fn files(&self, format: &Entry) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for path in self.paths() {
            files.extend(expand(path, format)?);
        }
        if files.is_empty() {
            return Err(Error::Config("data.path is an empty list, expected one path or more".to_owned()));
        }
        let mut sorted: Vec<&PathBuf> = files.iter().collect();
        sorted.sort();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Config(format!("data.path names {} twice; leave one", pair[0].display())));
        }
        Ok(files)
    }
}

/// The files of one path.
fn expand(path: &Path, format: &Entry) -> Result<Vec<PathBuf>> {
    let one = || vec![path.to_owned()];
    let text = path.to_string_lossy();
    if is_url(path) {
        return Ok(one());
    }
    if path.is_dir() {
        let files = if format.takes_folders() || has_extension(path, format) {
            Vec::new()
        } else {
            listed(path, format)?
        };
        return Ok(if files.is_empty() { one() } else { files });
    }
    if path.exists() || !text.contains(['*', '?', '[']) {
        return Ok(one());
    }
    let wrong = |error: &dyn fmt::Display| Error::Config(format!("data.path: the pattern {text:?}: {error}"));
    let found = glob::glob(&text).map_err(|error| wrong(&error))?;
    let mut files = found.collect::<Result<Vec<PathBuf>, _>>().map_err(|error| wrong(&error))?;
    if files.is_empty() {
        return Err(wrong(&"no file has such a name"));
    }
    files.sort_by(|one, other| by_name(one, other));
    Ok(files)
}

/// The members of a folder that have an extension of the format.
fn listed(folder: &Path, format: &Entry) -> Result<Vec<PathBuf>> {
    let failed = |error| Error::io(folder, "list it", error);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let hidden = file.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if has_extension(&file, format) && !hidden {
            files.push(file);
        }
    }
    files.sort_by(|one, other| by_name(one, other));
    Ok(files)
}

fn has_extension(path: &Path, format: &Entry) -> bool {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    extension.is_some_and(|extension| format.extensions().contains(&extension.as_str()))
}

/// The order of names in which `part_2` is before `part_10`.
fn by_name(one: &Path, other: &Path) -> Ordering {
    let pieces = |path: &Path| -> Vec<(u128, String)> {
        let text = path.to_string_lossy();
        let mut pieces: Vec<(u128, String)> = Vec::new();
        let mut is_number = false;
        for letter in text.chars() {
            let digit = letter.is_ascii_digit();
            match pieces.last_mut().filter(|_| digit == is_number) {
                Some((_, piece)) => piece.push(letter),
                None => pieces.push((0, letter.to_string())),
            }
            is_number = digit;
        }
        for (number, piece) in &mut pieces {
            // Digits are before letters, and no number is so large.
            *number = piece.parse().unwrap_or(u128::MAX);
        }
        pieces
    };
    pieces(one).cmp(&pieces(other)).then_with(|| one.cmp(other))
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;
    use crate::registry::find;

    #[test]
    fn numbers_in_names_are_in_order() {
        let mut names = ["a_10.nc", "a_9.nc", "b.nc", "a_009.nc", "a.nc", "a_1.5.nc"].map(Path::new);
        names.sort_by(|one, other| by_name(one, other));
        assert_eq!(names, ["a.nc", "a_1.5.nc", "a_009.nc", "a_9.nc", "a_10.nc", "b.nc"].map(Path::new));
    }

    #[test]
    fn folders_patterns_and_lists_are_files() {
        let folder = tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["b_10.nc", "b_9.nc", "c.NC", ".hidden.nc", "notes.txt", "odd[1].nc"] {
            std::fs::write(at(name), "").unwrap();
        }
        let netcdf = find("netcdf").unwrap();
        let files = |path: DataPath| path.files(&netcdf).map_err(|error| error.to_string());
        let many = |names: &[&str]| Ok(names.iter().map(|name| at(name)).collect::<Vec<_>>());
        assert_eq!(files(folder.path().into()), many(&["b_9.nc", "b_10.nc", "c.NC", "odd[1].nc"]));
        assert_eq!(files(at("b_*.nc").into()), many(&["b_9.nc", "b_10.nc"]));
        assert_eq!(files(at("odd[1].nc").into()), many(&["odd[1].nc"]), "a file of that name");
        assert_eq!(files(at("none.nc").into()), many(&["none.nc"]), "left to the format");
        let list = DataPath::Many(vec![at("c.NC"), at("b_?.nc")]);
        assert_eq!(files(list), many(&["c.NC", "b_9.nc"]));
        assert_eq!(files("s3://bucket/a_*.zarr".into()), Ok(vec!["s3://bucket/a_*.zarr".into()]));
        let refused = |path: DataPath, expected: &str| {
            let error = files(path).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        refused(at("none_*.nc").into(), "no file has such a name");
        refused(at("a**b.nc").into(), "the pattern");
        refused(DataPath::Many(Vec::new()), "an empty list");
        refused(DataPath::Many(vec![at("b_9.nc"), at("b_*.nc")]), "b_9.nc twice");
    }

    #[test]
    fn a_folder_of_arrays_is_one_data_set() {
        let folder = tempdir().unwrap();
        std::fs::write(folder.path().join("u.npy"), "").unwrap();
        let files = DataPath::from(folder.path()).files(&find("npy").unwrap()).unwrap();
        assert_eq!(files, [folder.path()]);
    }
}
