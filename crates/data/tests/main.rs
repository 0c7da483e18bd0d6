//! Readers, writers and generators of data sets.

mod cf;
mod common;
mod etdrk;
mod formats;
mod generate;
mod grids;
mod halo;
mod joined;
mod layouts;
mod parts;
mod pdebench;
mod read;
mod refuse;
mod remote;
mod sample_times;
mod shallow_water;
mod statistics;
mod storage;
mod stream;
mod well;
mod well_refuse;
mod windows;
mod writers;
mod zarr;
