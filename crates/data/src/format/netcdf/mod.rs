//! NetCDF files: NetCDF-4, which is HDF5, and the classic formats.
//!
//! It reads arrays and attributes; `cf` interprets CF's attributes.

mod classic;

use std::path::Path;

use crate::arrays::{ArrayDataset, ArrayOptions, Arrays};
use crate::content::Content;
use crate::dataset::Dataset;
use crate::dataset_writer::DatasetWriter;
use crate::format::hdf5::Hdf5Arrays;
use crate::hdf5::plain::{self, Dialect};
use crate::registry::{DataSource, Format};
use crate::writers::WriterFormat;
use crate::{Error, Result, register, register_writer};

/// The format `netcdf`.
struct NetCdf;

register!(NetCdf);

impl Format for NetCdf {
    const NAME: &'static str = "netcdf";
    const SUMMARY: &'static str = "NetCDF-4 and classic NetCDF, with units, packing and fill values of CF.";
    const EXTENSIONS: &'static [&'static str] = &["nc", "nc4", "cdf"];
    type Options = ArrayOptions;

    fn open(source: &DataSource<'_>, options: ArrayOptions) -> Result<Box<dyn Dataset>> {
        let path = source.path();
        let file = isobar_files::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::Missing { path: path.to_owned() },
            _ => Error::io(path, "open it", error),
        })?;
        let arrays: Box<dyn Arrays> = match classic::Classic::open(path, file)? {
            Some(classic) => Box::new(classic),
            None => Box::new(Hdf5Arrays::open(path)?.of_netcdf()),
        };
        ArrayDataset::open(arrays, source, options)
    }
}

/// NetCDF-4, which is HDF5 with dimension scales.
struct NetCdfWriter;

register_writer!(NetCdfWriter);

impl WriterFormat for NetCdfWriter {
    const NAME: &'static str = "netcdf";
    const SUMMARY: &'static str = "NetCDF-4 with the conventions of CF, for xarray and others.";
    const EXTENSIONS: &'static [&'static str] = &["nc", "nc4"];

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        plain::create(path, content, Dialect::NetCdf)
    }
}
