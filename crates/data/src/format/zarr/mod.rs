//! Zarr, versions 2 and 3, in folders.

mod arrays;
mod attributes;
mod boxes;
mod codecs;
mod nodes;
mod options;
mod store;
mod writer;

use std::path::Path;

use self::arrays::ZarrArrays;
use self::options::ZarrOptions;
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
    const SUMMARY: &'static str = "Zarr of version 2 or 3, in a folder, with the conventions of CF.";
    const EXTENSIONS: &'static [&'static str] = &["zarr"];
    type Options = ZarrOptions;

    fn open(source: &DataSource<'_>, options: ZarrOptions) -> Result<Box<dyn Dataset>> {
        let path = source.path();
        let arrays = ZarrArrays::open(path, store(path)?, options.missing_chunks)?;
        ArrayDataset::open(Box::new(arrays), source, options.arrays)
    }
}

/// Opens the store of a path.
fn store(path: &Path) -> Result<Box<dyn Store>> {
    let folder = Folder::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::Missing { path: path.to_owned() },
        _ => Error::io(path, "open it", error),
    })?;
    Ok(Box::new(folder))
}
