//! Plain HDF5: datasets that `[data.hdf5]` names.

mod arrays;

pub(crate) use self::arrays::Hdf5Arrays;
use crate::arrays::{ArrayDataset, ArrayOptions};
use crate::dataset::Dataset;
use crate::registry::{DataSource, Format};
use crate::{Result, register};

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
