//! Axes of a variable in a file that is written, and checks of the values that are given for it.

use std::ops::Range;
use std::path::Path;

use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

use super::{Content, SAMPLE, TIME};
use crate::boxes::check_range;
use crate::finite::check_values;
use crate::grid::{DataVariable, Dim};
use crate::{Error, Result};

/// Stored axes of a variable: `[sample, time, channel, x, …]`, without those that it does not vary along.
#[derive(Debug)]
pub(crate) struct StoredAxes {
    /// `None` for one field of all samples and times.
    samples: Option<usize>,
    /// `None` without times.
    frames: Option<usize>,
    channels: usize,
    has_channel_axis: bool,
    /// Points along each spatial dim; one each for a variable without spatial dims.
    grid: Vec<usize>,
    is_uniform: bool,
}

/// Values of a window that were checked.
pub(crate) struct Checked {
    /// Frames of the sample.
    pub(crate) frames: Range<usize>,
    /// Place along the stored axes.
    pub(crate) window: Vec<Range<usize>>,
    pub(crate) values: Vec<f32>,
}

impl StoredAxes {
    pub(crate) fn new(content: &Content, variable: &DataVariable) -> Self {
        let Content { meta, dims, .. } = content;
        let point = |dim: &Dim| if variable.uniform { 1 } else { dim.coordinates.len() };
        Self {
            samples: (!variable.is_static).then_some(meta.samples),
            frames: (!variable.is_static && !meta.times.is_empty()).then_some(meta.times.len()),
            channels: variable.channels.len(),
            has_channel_axis: variable.has_channel_axis(),
            grid: dims.iter().map(point).collect(),
            is_uniform: variable.uniform,
        }
    }

    /// Names of the axes, where `channel` names that of channels.
    pub(crate) fn names(&self, channel: &str, dims: &[Dim]) -> Vec<String> {
        let leading = [
            self.samples.map(|_| SAMPLE),
            self.frames.map(|_| TIME),
            self.has_channel_axis.then_some(channel),
        ];
        let dims = dims.iter().filter(|_| !self.is_uniform).map(|dim| dim.name.as_str());
        leading.into_iter().flatten().chain(dims).map(str::to_owned).collect()
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        let channels = self.has_channel_axis.then_some(self.channels);
        let leading = [self.samples, self.frames, channels].into_iter().flatten();
        leading.chain(self.grid.iter().copied().filter(|_| !self.is_uniform)).collect()
    }

    /// Number of frames of all samples.
    pub(crate) fn all_frames(&self) -> usize {
        self.samples.unwrap_or(1).saturating_mul(self.frame_count())
    }

    /// Number of frames of a sample.
    pub(crate) fn frame_count(&self) -> usize {
        self.frames.unwrap_or(1)
    }

    /// Number of channels.
    pub(crate) fn channels(&self) -> usize {
        self.channels
    }

    /// Points along each spatial dim of the values that are given.
    pub(crate) fn grid(&self) -> &[usize] {
        &self.grid
    }

    /// All points.
    pub(crate) fn all_points(&self) -> Vec<Range<usize>> {
        self.grid.iter().map(|&points| 0..points).collect()
    }

    /// Stored window of consecutive frames of a sample.
    pub(crate) fn window(
        &self,
        sample: usize,
        frames: Range<usize>,
        points: &[Range<usize>],
    ) -> Vec<Range<usize>> {
        let leading = [
            self.samples.map(|_| sample..sample + 1),
            self.frames.map(|_| frames),
            self.has_channel_axis.then_some(0..self.channels),
        ];
        leading.into_iter().flatten().chain(points.iter().filter(|_| !self.is_uniform).cloned()).collect()
    }

    /// Checks values that are given for a window of the points of consecutive frames, `[frame, channel, x, …]`: their shape and place, and
    /// that they are finite, or NaN if that marks values that are `missing`. `None` of no value.
    pub(crate) fn checked(
        &self,
        (target, missing): (&Path, bool),
        variable: &str,
        (sample, first): (usize, usize),
        points: &[Range<usize>],
        values: &Tensor,
    ) -> Result<Option<Checked>> {
        let frames = self.check(variable, (sample, first), points, values)?;
        if values.numel() == 0 {
            return Ok(None);
        }
        let values = values.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let values: Vec<f32> = memory::to_vec(&values)?;
        let window = self.window(sample, frames.clone(), points);
        check_values(target, variable, &window, &values, missing)?;
        Ok(Some(Checked { frames, window, values }))
    }

    /// Checks the shape and place of values, and returns their frames.
    fn check(
        &self,
        variable: &str,
        (sample, first): (usize, usize),
        points: &[Range<usize>],
        values: &Tensor,
    ) -> Result<Range<usize>> {
        let given: Vec<usize> = values.size().iter().map(|&extent| extent as usize).collect();
        let extents: Vec<usize> = points.iter().map(Range::len).collect();
        let fits = points.len() == self.grid.len() && given.len() == points.len() + 2;
        if !fits || given[1] != self.channels || given[2..] != extents {
            return Err(Error::Invalid(format!(
                "values of shape {given:?} were given for `{variable}`: expected [frame, {}, {extents:?}]",
                self.channels
            )));
        }
        let frames = first..first.saturating_add(given[0]);
        check_range("sample range", &(sample..sample.saturating_add(1)), self.samples.unwrap_or(1))?;
        check_range("frame range", &frames, self.frame_count())?;
        for (range, &points) in points.iter().zip(&self.grid) {
            check_range("range of points", range, points)?;
        }
        Ok(frames)
    }
}
