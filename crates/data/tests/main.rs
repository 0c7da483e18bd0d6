//! Readers, writers and generators of data sets.

mod common;
mod etdrk;
mod formats;
mod generate;
mod joined;
mod parts;
mod read;
mod refuse;
mod storage;
mod stream;
mod well;
mod well_refuse;
mod writers;
mod zarr;
