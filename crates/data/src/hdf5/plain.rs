//! Writes plain HDF5: a dataset for each variable, with the names of its axes.

use std::ops::Range;
use std::path::Path;

use hdf5_metno::Dataset;
use isobar_torch::memory;
use ndarray::ArrayView;
use tch::{Device, Kind, Tensor};

use super::aside::Aside;
use super::layout::{check_finite, check_range, hyperslab};
use super::{text, texts, write_attribute};
use crate::grid::{DataVariable, Dim, PredictionMeta};
use crate::{Error, Result};

/// Attribute of a dataset: names of its axes, in order.
pub(crate) const AXES: &str = "axes";
/// Attribute of a dataset: unit of its values.
pub(crate) const UNITS: &str = "units";
/// Attribute of coordinates: whether the first point follows the last.
pub(crate) const PERIODIC: &str = "periodic";
/// Name of the axis of samples.
pub(crate) const SAMPLE: &str = "sample";
/// Name of the axis of frames.
pub(crate) const TIME: &str = "time";
/// Name of the axis of channels.
pub(crate) const CHANNEL: &str = "channel";

/// A plain HDF5 file of predictions: `/<variable>` is `[sample, time, channel, x, …]`, without time for samples that have
/// none, and without channel for scalars; `/<dim>` and `/time` are coordinates. The attribute `axes` of each dataset names
/// its axes, and `units` its unit. It takes its name in `finish`.
#[derive(Debug)]
pub(crate) struct PlainWriter {
    aside: Aside,
    samples: usize,
    /// `None` for samples without time.
    frames: Option<usize>,
    grid: Vec<usize>,
    variables: Vec<Variable>,
}

#[derive(Debug)]
struct Variable {
    name: String,
    channels: usize,
    dataset: Dataset,
    /// By sample and frame.
    written: Vec<bool>,
}

impl PlainWriter {
    pub(crate) fn create(
        path: &Path,
        meta: &PredictionMeta,
        dims: &[Dim],
        variables: &[DataVariable],
    ) -> Result<Self> {
        let taken = |name: &str| name == TIME || dims.iter().any(|dim| dim.name == name);
        if let Some(variable) =
            variables.iter().find(|variable| !is_link(&variable.name) || taken(&variable.name))
        {
            return Err(Error::Invalid(format!(
                "{:?} cannot be the name of a dataset in a plain HDF5 file",
                variable.name
            )));
        }
        let aside = Aside::create(path)?;
        let failed = |error| Error::hdf5(path, "write its layout", error);
        write_attribute(&aside, "dataset_name", &meta.name)?;
        meta.attributes.iter().try_for_each(|(name, text)| write_attribute(&aside, name, text))?;
        for dim in dims {
            let unit = dim.unit.as_deref();
            let dataset = coordinates(&aside, &dim.name, &dim.coordinates, unit).map_err(failed)?;
            if dim.periodic {
                super::number(&dataset, PERIODIC, true).map_err(failed)?;
            }
        }
        let frames = (!meta.times.is_empty()).then_some(meta.times.len());
        if frames.is_some() {
            coordinates(&aside, TIME, &meta.times, None).map_err(failed)?;
        }
        let grid: Vec<usize> = dims.iter().map(|dim| dim.coordinates.len()).collect();
        let variable = |variable: &DataVariable| -> hdf5_metno::Result<Variable> {
            let channels = variable.channels.len();
            let shape = shape(meta.samples, frames, channels, &grid);
            let builder = aside.file().new_dataset_builder().obj_track_times(false);
            let dataset = builder.empty::<f32>().shape(shape).create(variable.name.as_str())?;
            let time = frames.map(|_| TIME);
            let channel = (channels > 1).then_some(CHANNEL);
            let names = [Some(SAMPLE), time, channel].into_iter().flatten();
            texts(&dataset, AXES, names.chain(dims.iter().map(|dim| dim.name.as_str())))?;
            if let Some(unit) = &variable.unit {
                text(&dataset, UNITS, unit)?;
            }
            let written = vec![false; meta.samples * frames.unwrap_or(1)];
            Ok(Variable { name: variable.name.clone(), channels, dataset, written })
        };
        let variables = variables.iter().map(variable).collect::<hdf5_metno::Result<_>>().map_err(failed)?;
        Ok(Self { aside, samples: meta.samples, frames, grid, variables })
    }

    /// Writes consecutive frames of one variable and sample: `[frame, channel, x, …]`.
    pub(crate) fn write(
        &mut self,
        variable: &str,
        sample: usize,
        first: usize,
        values: &Tensor,
    ) -> Result<()> {
        let path = self.aside.target();
        let found = || self.variables.iter().map(|variable| variable.name.clone()).collect();
        let Some(at) = self.variables.iter().position(|known| known.name == variable) else {
            return Err(Error::MissingField {
                path: path.to_owned(),
                field: variable.to_owned(),
                found: found(),
            });
        };
        check_range("sample range", &(sample..sample + 1), self.samples)?;
        let of = &mut self.variables[at];
        let given: Vec<usize> = values.size().iter().map(|&extent| extent as usize).collect();
        if given.len() != self.grid.len() + 2 || given[1] != of.channels || given[2..] != self.grid {
            return Err(Error::Invalid(format!(
                "values of shape {given:?} were given for `{variable}`: expected [frame, {}, {:?}]",
                of.channels, self.grid
            )));
        }
        let all = self.frames.unwrap_or(1);
        let frames = first..first.saturating_add(given[0]);
        check_range("frame range", &frames, all)?;
        if frames.is_empty() {
            return Ok(());
        }
        let stored = values.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let stored: Vec<f32> = memory::to_vec(&stored)?;
        let time = self.frames.map(|_| frames.clone());
        let channel = (of.channels > 1).then_some(0..of.channels);
        let window: Vec<Range<usize>> = [Some(sample..sample + 1), time, channel]
            .into_iter()
            .flatten()
            .chain(self.grid.iter().map(|&points| 0..points))
            .collect();
        check_finite(path, variable, &window, &stored)?;
        let failed = |error| Error::hdf5(path, format!("write dataset `{variable}`"), error);
        let extents: Vec<usize> = window.iter().map(Range::len).collect();
        let view = ArrayView::from_shape(extents, &stored).map_err(|error| failed(error.into()))?;
        of.dataset.write_slice(view, hyperslab(&window)).map_err(failed)?;
        of.written[sample * all + frames.start..sample * all + frames.end].fill(true);
        Ok(())
    }

    /// Puts the file in its place.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { aside, frames, variables, .. } = self;
        let frames = frames.unwrap_or(1);
        for variable in &variables {
            if let Some(at) = variable.written.iter().position(|written| !written) {
                return Err(Error::Invalid(format!(
                    "frame {} of sample {} of `{}` was not written; add it first",
                    at % frames,
                    at / frames,
                    variable.name
                )));
            }
        }
        drop(variables);
        aside.finish()
    }
}

fn shape(samples: usize, frames: Option<usize>, channels: usize, grid: &[usize]) -> Vec<usize> {
    let channels = (channels > 1).then_some(channels);
    [Some(samples), frames, channels].into_iter().flatten().chain(grid.iter().copied()).collect()
}

fn coordinates(aside: &Aside, name: &str, values: &[f64], unit: Option<&str>) -> hdf5_metno::Result<Dataset> {
    let dataset = aside.file().new_dataset_builder().obj_track_times(false).with_data(values).create(name)?;
    texts(&dataset, AXES, [name].into_iter())?;
    if let Some(unit) = unit {
        text(&dataset, UNITS, unit)?;
    }
    Ok(dataset)
}

/// Returns whether a name can be that of a link.
fn is_link(name: &str) -> bool {
    !name.is_empty() && name != "." && !name.contains(['/', '\0'])
}
