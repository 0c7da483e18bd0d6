//! Places of files, however their paths are written.

use std::path::{Component, Path, PathBuf};

/// Returns whether a path is a URL, such as `s3://bucket/prefix`.
///
/// ```
/// use std::path::Path;
///
/// assert!(isobar_files::is_url(Path::new("s3://bucket/prefix")));
/// assert!(!isobar_files::is_url(Path::new("data/era5.zarr")));
/// ```
pub fn is_url(path: &Path) -> bool {
    path.to_string_lossy().contains("://")
}

/// Returns whether a path is one of these files, or in one of these folders. The path need not exist; links are resolved.
///
/// ```
/// let folder = tempfile::tempdir()?;
/// let store = folder.path().join("data.zarr");
/// std::fs::create_dir(&store)?;
/// assert!(isobar_files::is_within(&store.join("new/file"), &[store.clone()]));
/// assert!(!isobar_files::is_within(&folder.path().join("data.zarr.h5"), &[store]));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn is_within(path: &Path, files: &[PathBuf]) -> bool {
    let Some(path) = resolve(path) else { return false };
    files.iter().any(|file| file.canonicalize().is_ok_and(|file| path.starts_with(file)))
}

/// Resolves links and `..` of a path as far as it exists, and `..` of the rest. `None` if no folder above it can be read.
pub fn resolve(path: &Path) -> Option<PathBuf> {
    let existing = |ancestor: &Path| match ancestor.as_os_str().is_empty() {
        true => Path::new(".").canonicalize().ok(),
        false => ancestor.canonicalize().ok(),
    };
    let (ancestor, mut all) = path.ancestors().find_map(|own| Some((own, existing(own)?)))?;
    let rest = path.strip_prefix(ancestor).ok()?;
    if !rest.components().any(|part| part == Component::ParentDir) {
        return Some(all.join(rest));
    }
    for part in rest.components() {
        match part {
            Component::ParentDir => {
                all.pop();
            }
            part => all.push(part),
        }
    }
    // What follows `..` may exist.
    resolve(&all)
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;

    /// Files inside a store belong to it, existing or not, however their paths are written.
    #[test]
    fn what_is_in_a_folder_is_within_it() {
        let folder = tempdir().unwrap();
        let store = folder.path().join("data.zarr");
        std::fs::create_dir_all(store.join("u")).unwrap();
        let file = folder.path().join("other.h5");
        std::fs::write(&file, "").unwrap();
        let files = [store.clone(), file];
        let is_within = |path: &str| super::is_within(&folder.path().join(path), &files);
        for path in [
            "data.zarr",
            "data.zarr/u",
            "data.zarr/new.h5",
            "data.zarr/new/new.h5",
            "data.zarr/u/../new.h5",
            "other.h5",
        ] {
            assert!(is_within(path), "{path}");
        }
        assert!(is_within("new/../data.zarr/new.h5"), "over what does not exist");
        for path in [
            "new.h5",
            "data.zarr.h5",
            "new/data.zarr",
            "data.zarr/../new.h5",
            "data.zarr/new/../../new.h5",
            "",
        ] {
            assert!(!is_within(path), "{path}");
        }
        assert!(!super::is_within(Path::new("new.h5"), &files), "in the current folder");
        assert!(super::is_within(Path::new("new/new.h5"), &[PathBuf::from(".")]));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&store, folder.path().join("link")).unwrap();
            assert!(is_within("link/new.h5") && is_within("new/../link/new.h5"));
        }
    }
}
