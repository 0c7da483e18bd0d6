//! Data for training: readers that hand each rank its part, the order in which samples are visited, and generators with
//! a solver for machines without data.
//!
//! | | |
//! |---|---|
//! | [`Dataset`], [`Format`], [`register!`] | the interface of every format, and how one registers itself by name |
//! | [`DataConfig`] | `[data]` of a configuration, which opens a data set |
//! | [`DataPath`], [`Join`] | a file, or many files as one data set |
//! | [`TargetConfig`] | targets in a data set of their own, which may be on another grid |
//! | [`Parts`], [`Frames`] | training, validation and test sets: of several files, or of ranges of times |
//! | [`TextAttributes`] | `standard_name`, `history` and other attributes of CF that are carried to the files that are written |
//! | [`TimeAxis`], [`Calendar`] | dates of CF's calendars |
//! | [`Computed`] | fields computed from times and coordinates, such as solar radiation |
//! | [`DarcyFile`] | reads 2-D Darcy flow in PDEBench's HDF5 layout, by windows; refuses what is damaged |
//! | [`DarcyWriter`] | writes that layout |
//! | [`WellFile`] | reads a file of The Well's HDF5 schema, by trajectory, frames and windows |
//! | [`WellWriter`], [`WellMeta`] | writes that schema |
//! | [`Samples`], [`InMemory`], [`Batch`] | samples as tensors |
//! | [`HaloWindow`] | a window and the rows around it, read without communication |
//! | [`Streamed`], [`Reader`] | samples that are read ahead of their use, in bounded memory |
//! | [`Statistics`], [`Normalizer`] | float64 statistics, and fields scaled by them |
//! | [`Sampler`], [`part`], [`split`] | the same global batches on 1 and N ranks, and a rank's part of each |
//! | [`Augment`] | random symmetries |
//! | [`WriterFormat`], [`register_writer!`] | a format that data sets are written in |
//! | [`summarize`] | statistics of variables and of their changes, weighted by cell area |
//! | [`generate`], [`coarse_fields`], [`block_means`] | generators of data sets; inputs of super-resolution |
//!
//! A window of a data set is `[sample, frame, channel, x, …]`, float32, with one to three spatial dims. Random numbers come
//! from a counter-based generator, by seed, epoch and sample number, so that they do not depend on the number of ranks.
//! Nothing communicates: each rank opens the file and reads its own part.
//!
//! HDF5 is linked from the system; the feature `hdf5-static` builds it in (needs CMake 3.26 or later). The HDF5 library
//! is called by one thread at a time, and its messages come as [`Error`]s, not on the terminal.

mod adapt;
mod area;
mod arrays;
mod attributes;
mod augment;
mod batch;
mod boxes;
mod calendar;
mod coarse;
mod compatible;
mod config;
mod content;
mod dataset;
mod dataset_writer;
mod dtype;
mod error;
mod finite;
mod format;
mod gaps;
pub mod generate;
mod grid;
mod halo;
mod hdf5;
mod joined;
mod logged;
mod memory;
mod pairs;
mod parts;
mod portions;
mod registry;
mod runs;
mod sampler;
mod samples;
mod spare;
mod stats;
mod steps;
mod stream;
mod summary;
mod unfinished;
mod window_writer;
mod writers;

pub use adapt::{Computed, Frames};
pub use area::area_weights;
pub use arrays::{ArrayDataset, ArrayInfo, ArrayOptions, Arrays, Values, VariableOptions, VariableTable};
pub use attributes::TextAttributes;
pub use augment::Augment;
pub use batch::{Batch, InMemory};
pub use calendar::{Calendar, Date, TimeAxis, TimePoint, TimeUnit};
pub use coarse::{block_means, coarse_fields};
pub use compatible::check_alike;
pub use config::{
    AugmentConfig, DataConfig, FormatName, FormatTables, Missing, Predict, ScalarsAs, TargetConfig,
};
pub use content::{Content, Storage};
pub use dataset::{Dataset, Window, check_window, choose};
pub use dataset_writer::DatasetWriter;
pub use error::{Error, Result};
pub use format::darcy::{DarcyFields, DarcyFile, DarcyStatistics, DarcyWriter};
pub use format::the_well::{WellDim, WellField, WellFile, WellMeta, WellWriter};
pub use format::zarr::remote_stamp;
pub use gaps::{missing_frames, usual_step};
pub use grid::{DataVariable, Dim, Levels, PredictionMeta};
pub use halo::HaloWindow;
#[doc(hidden)]
pub use inventory;
pub use joined::{DataPath, Join};
pub use memory::{Cache, HostMemory};
pub use parts::{Part, Parts};
pub use portions::{DataPortion, digest, merge_channels, portions, portions_of};
pub use registry::{DataSource, Entry, Format, NoOptions, register, registered};
pub use sampler::{Sampler, part, split, split_validation};
pub use samples::{Request, Samples};
pub use stats::{Normalizer, Statistics};
pub use steps::{StepsFrom, TrainSteps};
pub use stream::{Account, Reader, ReaderOptions, StreamOptions, Streamed, TargetWindow};
pub use summary::{Summary, summarize};
pub use writers::{WriterEntry, WriterFormat, writer, writers};
