//! Variables of a file that is being written.

use std::ops::Range;
use std::path::{Path, PathBuf};

use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

use super::{Content, StoredAxes};
use crate::finite::check_values;
use crate::grid::DataVariable;
use crate::{Error, Result};

/// Variables of a file that is being written, each with a storage handle of type `P`. Checks each write, and at the end that all frames
/// are complete.
#[derive(Debug)]
pub(crate) struct Written<P> {
    target: PathBuf,
    /// True if NaN marks missing values.
    missing: bool,
    variables: Vec<Variable<P>>,
}

#[derive(Debug)]
struct Variable<P> {
    name: String,
    axes: StoredAxes,
    place: P,
    /// Points of each channel that were written, by sample and frame.
    written: Vec<usize>,
}

impl<P> Written<P> {
    /// No variables yet.
    pub(crate) fn new(target: &Path, content: &Content) -> Self {
        Self { target: target.to_owned(), missing: content.meta.missing, variables: Vec::new() }
    }

    /// Adds a variable.
    pub(crate) fn add(&mut self, content: &Content, variable: &DataVariable, place: P) {
        let axes = StoredAxes::new(content, variable);
        let written = vec![0; axes.all_frames()];
        self.variables.push(Variable { name: variable.name.clone(), axes, place, written });
    }

    /// Path of the complete file or folder.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// All points of a variable.
    pub(crate) fn points(&self, variable: &str) -> Vec<Range<usize>> {
        let of = self.variables.iter().find(|known| known.name == variable);
        of.map(|of| of.axes.all_points()).unwrap_or_default()
    }

    /// Writes a window of consecutive frames of one variable and sample, `[frame, channel, x, …]`: calls `store` with its handle, the
    /// window in the stored axes, and the values.
    pub(crate) fn write(
        &mut self,
        variable: &str,
        (sample, first): (usize, usize),
        points: &[Range<usize>],
        values: &Tensor,
        store: impl FnOnce(&P, &[Range<usize>], &[f32]) -> Result<()>,
    ) -> Result<()> {
        let Some(at) = self.variables.iter().position(|known| known.name == variable) else {
            return Err(Error::MissingField {
                path: self.target.clone(),
                field: variable.to_owned(),
                found: self.variables.iter().map(|variable| variable.name.clone()).collect(),
            });
        };
        let of = &mut self.variables[at];
        let frames = of.axes.check(variable, (sample, first), points, values)?;
        if values.numel() == 0 {
            return Ok(());
        }
        let stored = values.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let stored: Vec<f32> = memory::to_vec(&stored)?;
        let window = of.axes.window(sample, frames.clone(), points);
        check_values(&self.target, variable, &window, &stored, self.missing)?;
        store(&of.place, &window, &stored)?;
        let points: usize = points.iter().map(Range::len).product();
        let before = sample * of.axes.frame_count();
        let written = &mut of.written[before + frames.start..before + frames.end];
        written.iter_mut().for_each(|written| *written = written.saturating_add(points));
        Ok(())
    }

    /// Rejects frames that were not written, or not completely, and returns the places.
    pub(crate) fn finish(self) -> Result<Vec<P>> {
        for variable in &self.variables {
            let (frames, points) = (variable.axes.frame_count(), variable.axes.grid().iter().product());
            if let Some(at) = variable.written.iter().position(|&written| written < points) {
                return Err(Error::Invalid(format!(
                    "frame {} of sample {} of `{}` was not written; add it first",
                    at % frames,
                    at / frames,
                    variable.name
                )));
            }
        }
        Ok(self.variables.into_iter().map(|variable| variable.place).collect())
    }
}
