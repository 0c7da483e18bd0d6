//! Readers, writers and generators of data sets.

mod common;
mod formats;
mod generate;
mod read;
mod refuse;
mod storage;
mod well;
mod well_refuse;
