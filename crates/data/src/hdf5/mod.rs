//! HDF5 files: checked before they are opened, read by windows with bounded memory, written under a temporary name.
//!
//! Formats that are stored in HDF5 share it. It knows groups, datasets and attributes, and never what they mean.

pub(crate) mod atomic_file;
pub(crate) mod attribute;
mod chunks;
pub(crate) mod isolation;
pub(crate) mod layout;
pub(crate) mod plain;
mod scales;
pub(crate) mod serve;
pub(crate) mod storage;
pub(crate) mod stored;
mod unpack;
mod whole;

use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{H5Type, Location};

use self::atomic_file::AtomicFile;
use crate::{Error, Result};

/// Writes a text as an attribute of the file.
pub(crate) fn write_attribute(aside: &AtomicFile, name: &str, value: &str) -> Result<()> {
    text(aside.file(), name, value)
        .map_err(|error| Error::hdf5(aside.target(), format!("write the attribute `{name}`"), error))
}

/// Writes an attribute of one value.
pub(crate) fn number<T: H5Type>(location: &Location, name: &str, value: T) -> hdf5_metno::Result<()> {
    location.new_attr::<T>().create(name)?.write_scalar(&value)
}

/// Writes an attribute of one string.
pub(crate) fn text(location: &Location, name: &str, value: &str) -> hdf5_metno::Result<()> {
    number(location, name, variable(value)?)
}

/// Writes an attribute that is a list of strings.
pub(crate) fn texts<'a>(
    location: &Location,
    name: &str,
    values: impl Iterator<Item = &'a str>,
) -> hdf5_metno::Result<()> {
    let values = values.map(variable).collect::<hdf5_metno::Result<Vec<_>>>()?;
    let attribute = location.new_attr::<VarLenUnicode>().shape(values.len()).create(name)?;
    if values.is_empty() { Ok(()) } else { attribute.write_raw(&values) }
}

fn variable(text: &str) -> hdf5_metno::Result<VarLenUnicode> {
    text.parse().map_err(|error| hdf5_metno::Error::from(format!("{error}")))
}
