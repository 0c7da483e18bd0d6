//! Data for training: readers that hand each rank its part, the order in which samples are visited, and generators with
//! a solver for machines without data.
//!
//! | | |
//! |---|---|
//! | [`DarcyFile`] | reads 2-D Darcy flow in PDEBench's HDF5 layout, by windows; refuses what is damaged |
//! | [`DarcyWriter`] | writes that layout |
//! | [`WellFile`] | reads a file of The Well's HDF5 schema, by trajectory, frames and windows |
//! | [`WellWriter`], [`WellMeta`] | writes that schema |
//! | [`InMemory`], [`Batch`] | samples as tensors |
//! | [`Statistics`], [`Normalizer`] | float64 statistics, and fields scaled by them |
//! | [`Sampler`], [`part`], [`split`] | the same global batches on 1 and N ranks, and a rank's part of each |
//! | [`Augment`] | random symmetries |
//! | [`generate`] | data sets solved here |
//!
//! Fields are `[sample, channel, x, y]`, float32 unless told otherwise; of a simulation the frames take the samples' place,
//! and there may be one to three spatial dims. All that is random comes from a counter-based
//! generator, by seed, epoch and sample number, so that it does not depend on the number of ranks. Nothing communicates:
//! each rank opens the file and reads its own part.
//!
//! HDF5 is linked from the system; the feature `hdf5-static` builds it in (needs CMake 3.26 or later). The HDF5 library
//! is called by one thread at a time, and its messages come as [`Error`]s, not on the terminal.

mod aside;
mod attribute;
mod augment;
mod batch;
mod chunks;
mod darcy;
mod error;
mod format;
pub mod generate;
mod layout;
mod sampler;
mod stats;
mod storage;
mod well;
mod writer;

pub use augment::Augment;
pub use batch::{Batch, InMemory};
pub use darcy::{DarcyFields, DarcyFile, DarcyStatistics};
pub use error::{Error, Result};
pub use sampler::{Sampler, part, split, split_validation};
pub use stats::{Normalizer, Statistics};
pub use well::{WellDim, WellField, WellFile, WellMeta, WellWriter};
pub use writer::DarcyWriter;
