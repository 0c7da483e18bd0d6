//! Data formats, each in a folder that registers it.
//!
//! A folder knows its own format; nothing outside it does.

pub(crate) mod darcy;
mod hdf5;
mod netcdf;
mod npy;
mod pdebench;
mod safetensors;
pub(crate) mod the_well;
pub(crate) mod zarr;
