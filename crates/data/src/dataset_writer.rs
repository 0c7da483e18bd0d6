//! The interface of every file that is written.

use std::ops::Range;
use std::path::Path;

use tch::Tensor;

use crate::{Error, Result};

/// A file of predictions.
pub trait DatasetWriter {
    /// Writes consecutive frames of one variable and sample, from `first` on: `[frame, channel, x, …]`. A writer that
    /// takes windows may get frames of several samples in turn; any other writer gets one sample after the other. A variable
    /// that [is static](crate::DataVariable::is_static) is written once, as frame 0 of sample 0; one that
    /// [is uniform](crate::DataVariable::uniform) has one point along each dim.
    ///
    /// # Errors
    /// A variable, sample or frame that the file does not have, another shape, or a full disk. A format without NaN rejects it
    /// here with [`Error::NotFinite`]: `isobar predict` then writes plain HDF5.
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()>;

    /// Returns whether [`DatasetWriter::write_window`] takes parts of frames.
    fn takes_windows(&self) -> bool {
        false
    }

    /// Writes a window of the points of consecutive frames, like [`DatasetWriter::write`]. All windows of a frame cover it, once.
    ///
    /// # Errors
    /// As [`DatasetWriter::write`], and for a format that takes complete frames only.
    fn write_window(
        &mut self,
        _variable: &str,
        _sample: usize,
        _first: usize,
        _points: &[Range<usize>],
        _values: &Tensor,
    ) -> Result<()> {
        Err(Error::Invalid("this format takes complete frames, not windows of them".to_owned()))
    }

    /// The unfinished file or folder, if other ranks may write into it, or a later process resumes it: see
    /// [`WriterFormat::BY_RANK`](crate::WriterFormat::BY_RANK) and [`WriterFormat::resume`](crate::WriterFormat::resume).
    fn unfinished(&self) -> Option<&Path> {
        None
    }

    /// Extents of the boxes of points that one rank has to write as a whole, from the first point on, if several ranks write.
    fn tile(&self) -> Option<Vec<usize>> {
        None
    }

    /// Returns whether frames of a variable and sample are there from an earlier writer: see
    /// [`WriterFormat::resume`](crate::WriterFormat::resume).
    fn is_written(&self, _variable: &str, _sample: usize, _frames: Range<usize>) -> bool {
        false
    }

    /// Returns whether a later process can resume after values that were written, if this one ends before the file is complete: see
    /// [`WriterEntry::create_or_resume`](crate::WriterEntry::create_or_resume).
    fn is_resumable(&self) -> bool {
        false
    }

    /// Puts the file in its place. If several ranks write, those that joined call it first.
    ///
    /// # Errors
    /// Values that were not written, or a full disk.
    fn finish(self: Box<Self>) -> Result<()>;
}
