//! Plain HDF5: datasets that `[data.hdf5]` names.
//!
//! It assumes no schema: the configuration gives the meaning of the axes.

mod arrays;

use std::path::Path;

pub(crate) use self::arrays::Hdf5Arrays;
use crate::arrays::{ArrayDataset, ArrayOptions};
use crate::content::Content;
use crate::dataset::Dataset;
use crate::dataset_writer::DatasetWriter;
use crate::hdf5::plain::{self, Dialect};
use crate::registry::{DataSource, Format};
use crate::writers::WriterFormat;
use crate::{Result, register, register_writer};

register!(Hdf5Arrays);

impl Format for Hdf5Arrays {
    const NAME: &'static str = "hdf5";
    const SUMMARY: &'static str = "Plain HDF5: [data.hdf5] says which dataset is which variable.";
    const EXTENSIONS: &'static [&'static str] = &["h5", "hdf5", "he5", "mat"];
    type Options = ArrayOptions;

    fn open(source: &DataSource<'_>, options: ArrayOptions) -> Result<Box<dyn Dataset>> {
        source.check_extension()?;
        ArrayDataset::open(Box::new(Self::open(source.path())?), source, options)
    }
}

/// A dataset for each variable, with the names of its axes.
struct Hdf5Writer;

register_writer!(Hdf5Writer);

impl WriterFormat for Hdf5Writer {
    const NAME: &'static str = "hdf5";
    const SUMMARY: &'static str = "Plain HDF5: a dataset for each variable, with the names of its axes.";
    const EXTENSIONS: &'static [&'static str] = &["h5", "hdf5"];

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        plain::create(path, content, Dialect::Plain)
    }
}
