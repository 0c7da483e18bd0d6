//! Zarr, versions 2 and 3, in folders and object stores.
//!
//! It does not depend on where a store is: files and object stores are read alike.

mod arrays;
mod attributes;
mod codecs;
mod nodes;
mod options;
mod remote;
mod store;
mod writer;

use std::ffi::OsString;
use std::path::Path;

use isobar_files::is_url;

use self::arrays::ZarrArrays;
use self::options::ZarrOptions;
use self::remote::Remote;
use self::store::{Folder, Store};
use crate::arrays::ArrayDataset;
use crate::dataset::Dataset;
use crate::registry::{DataSource, Format};
use crate::{Error, Result, register};

/// The format `zarr`.
struct Zarr;

register!(Zarr);

impl Format for Zarr {
    const NAME: &'static str = "zarr";
    const SUMMARY: &'static str =
        "Zarr of version 2 or 3, in a folder or an object store, with the conventions of CF.";
    const EXTENSIONS: &'static [&'static str] = &["zarr"];
    type Options = ZarrOptions;

    fn open(source: &DataSource<'_>, options: ZarrOptions) -> Result<Box<dyn Dataset>> {
        let path = source.path();
        let arrays = ZarrArrays::open(path, store(path)?, options.missing_chunks)?;
        ArrayDataset::open(Box::new(arrays), source, options.arrays)
    }
}

/// Opens the store of a URL; `None` if a path is no URL.
fn remote(path: &Path) -> Option<std::io::Result<Remote>> {
    let url = path.to_str().filter(|_| is_url(path))?;
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    Some(Remote::open(url, std::env::vars_os().filter_map(text)))
}

/// Opens the store of a path.
fn store(path: &Path) -> Result<Box<dyn Store>> {
    if let Some(remote) = remote(path) {
        // A login in the URL stays out of logs.
        let shown =
            || path.to_string_lossy().split(['?', '#']).next().map(remote::without_login).unwrap_or_default();
        return Ok(Box::new(remote.map_err(|error| Error::io(Path::new(&shown()), "open it", error))?));
    }
    let folder = Folder::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::Missing { path: path.to_owned() },
        _ => Error::io(path, "open it", error),
    })?;
    Ok(Box::new(folder))
}

/// Describes the root metadata of a Zarr store at a URL: key, size, time and ETag of each, to tell whether it was written anew.
/// `None` if the path is no URL, or the server does not tell.
///
/// A store's chunks are not looked at. At most four requests, from the calling process.
///
/// ```
/// assert_eq!(isobar_data::remote_stamp(std::path::Path::new("data/era5.zarr")), None);
/// ```
pub fn remote_stamp(path: &Path) -> Option<String> {
    remote(path)?.ok()?.stamp()
}
