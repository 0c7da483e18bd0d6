//! Named arrays as a data set.

use std::ops::Range;
use std::path::Path;

use isobar_torch::memory::from_vec;
use tch::{Device, Kind, Tensor};

use super::layout::{Layout, Reader, Role, Variable};
use super::{ArrayOptions, Arrays, Values};
use crate::attributes::TextAttributes;
use crate::boxes::index_in_array;
use crate::calendar::TimeUnit;
use crate::dataset::{Dataset, Window, cat, check_window, choose};
use crate::grid::{DataVariable, Dim};
use crate::registry::DataSource;
use crate::{Error, Result};

/// A [`Dataset`] of named [`Arrays`]: what formats of plain arrays open.
///
/// Arrays whose axes lack one, such as static fields without time, are repeated along it.
#[derive(Debug)]
pub struct ArrayDataset {
    arrays: Box<dyn Arrays>,
    layout: Layout,
    /// Pieces of a stored trajectory, and frames of each.
    pieces: usize,
    /// Steps of a piece, if trajectories are cut.
    cut: Option<usize>,
    /// Times of a trajectory or piece.
    times: Option<Vec<f64>>,
    /// True if missing values are read as NaN.
    keeps_missing: bool,
    left_out: Vec<String>,
    attributes: TextAttributes,
}

impl ArrayDataset {
    /// Finds the variables that a run names among the arrays, described by the table `[data.<format>]`.
    ///
    /// # Errors
    /// Options that do not fit the arrays, variables that do not exist or disagree in shape, and coordinates that are not
    /// finite and in one order.
    pub fn open(
        arrays: Box<dyn Arrays>,
        source: &DataSource<'_>,
        options: ArrayOptions,
    ) -> Result<Box<dyn Dataset>> {
        let table = format!("data.{}", source.format());
        let reader = Reader { arrays: &*arrays, options: &options, source, table: table.clone() };
        let time = match source.variables() {
            [] if source.takes_all() => reader.time_axis(&reader.likely()),
            named => reader.time_axis(named),
        };
        let options = ArrayOptions { time, ..options.clone() };
        let reader = Reader { options: &options, ..reader };
        let (named, left_out) = match source.variables() {
            [] if source.takes_all() => reader.on_grid(),
            named => (named.to_vec(), Vec::new()),
        };
        let of_file = if source.takes_all() { reader.frames() } else { None };
        let layout = reader.layout(&named, source.levels(), of_file)?;
        let frames = layout.times.as_ref().map_or(1, Vec::len);
        if let Some(cut) = options.cut.filter(|cut| *cut == 0 || *cut >= frames) {
            return Err(Error::Config(format!(
                "{table}.cut is {cut}, expected 1 to {}: trajectories of {} have {frames} frames",
                frames.saturating_sub(1),
                arrays.path().display()
            )));
        }
        let pieces = options.cut.map_or(1, |cut| (frames - 1) / cut);
        let times = match options.cut {
            Some(cut) => layout.times.as_ref().map(|times| times[..=cut].to_vec()),
            None => layout.times.clone(),
        };
        let attributes = arrays.attributes()?;
        Ok(Box::new(Self {
            arrays,
            layout,
            pieces,
            cut: options.cut,
            times,
            keeps_missing: source.keeps_missing(),
            left_out,
            attributes,
        }))
    }

    /// Reads consecutive stored samples and channels of a variable: `[sample, frame, channel, x, …]`.
    fn slab(
        &self,
        variable: &Variable,
        (samples, frames): (&Range<usize>, &Range<usize>),
        channels: &Range<usize>,
        points: &[Range<usize>],
    ) -> Result<Tensor> {
        let range = |role: &Role| match role {
            Role::Sample => samples.clone(),
            Role::Time => frames.clone(),
            Role::Channel => channels.clone(),
            Role::Space(dim) => points[*dim].clone(),
        };
        let window: Vec<Range<usize>> = variable.roles.iter().map(range).collect();
        let expected: usize = window.iter().map(Range::len).product();
        let values = self.arrays.read(&variable.path, &window)?;
        if values.len() != expected {
            return Err(Error::Invalid(format!(
                "{}: {} values of `{}` were read where the window has {expected}",
                self.arrays.path().display(),
                values.len(),
                variable.path
            )));
        }
        let values = self.decode(variable, &window, values)?;
        let stored: Vec<i64> = window.iter().map(|range| range.len() as i64).collect();
        let tensor = from_vec(values, &stored)?;
        // Stored axes in the order of roles, and those that are missing of extent 1.
        let target: Vec<Role> = [Role::Sample, Role::Time, Role::Channel]
            .into_iter()
            .chain((0..points.len()).map(Role::Space))
            .collect();
        let place = |role: &Role| variable.roles.iter().position(|own| own == role);
        let order: Vec<i64> = target.iter().filter_map(place).map(|at| at as i64).collect();
        let extents: Vec<i64> = target.iter().map(|role| place(role).map_or(1, |at| stored[at])).collect();
        let tensor = tensor.f_permute(order)?.f_reshape(extents)?;
        let full: Vec<i64> = [samples.len(), frames.len(), channels.len()]
            .into_iter()
            .chain(points.iter().map(Range::len))
            .map(|extent| extent as i64)
            .collect();
        Ok(tensor.f_expand(full, false)?)
    }

    /// Unpacks stored numbers; refuses missing values and those that are not finite.
    fn decode(&self, variable: &Variable, window: &[Range<usize>], values: Values) -> Result<Vec<f32>> {
        let info = &variable.info;
        let values = unsigned(info.wrap, values);
        let missing = |value: f64| value.is_nan() || info.is_missing(value);
        let packed = (info.scale, info.offset) != (1.0, 0.0);
        if self.keeps_missing {
            return self.with_nan(variable, window, values);
        }
        let values = match values {
            Values::F32(values) if !packed && info.are_good(&values) => return Ok(values),
            values => values,
        };
        let found = match &values {
            // NaN is found with the infinities.
            _ if info.missing.is_empty() && info.valid.is_none() => None,
            Values::F32(values) => values.iter().position(|&value| missing(f64::from(value))),
            Values::F64(values) => values.iter().position(|&value| missing(value)),
        };
        let missing_value = |at: usize, value: f64| Error::MissingValue {
            path: self.arrays.path().to_owned(),
            dataset: variable.path.clone(),
            value,
            index: index_in_array(window, at),
        };
        match (found, &values) {
            (Some(at), Values::F32(values)) => return Err(missing_value(at, f64::from(values[at]))),
            (Some(at), Values::F64(values)) => return Err(missing_value(at, values[at])),
            (None, _) => (),
        }
        let values: Vec<f32> = match values {
            Values::F32(values) if !packed => values,
            values => {
                values.into_f64().into_iter().map(|value| (value * info.scale + info.offset) as f32).collect()
            }
        };
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) if values[at].is_nan() => Err(missing_value(at, f64::NAN)),
            Some(at) => Err(Error::NotFinite {
                path: self.arrays.path().to_owned(),
                dataset: variable.path.clone(),
                index: index_in_array(window, at),
                value: f64::from(values[at]),
            }),
        }
    }

    /// Unpacks stored numbers, with NaN for missing values; refuses infinities.
    fn with_nan(&self, variable: &Variable, window: &[Range<usize>], values: Values) -> Result<Vec<f32>> {
        let info = &variable.info;
        let unpack = |value: f64| match info.is_missing(value) {
            true => f32::NAN,
            false => (value * info.scale + info.offset) as f32,
        };
        let values: Vec<f32> = values.into_f64().into_iter().map(unpack).collect();
        match values.iter().position(|value| value.is_infinite()) {
            None => Ok(values),
            Some(at) => Err(Error::NotFinite {
                path: self.arrays.path().to_owned(),
                dataset: variable.path.clone(),
                index: index_in_array(window, at),
                value: f64::from(values[at]),
            }),
        }
    }

    /// Samples in ascending runs of consecutive stored ones, so that a chunk is decompressed once; with the frames of each.
    fn runs(&self, sorted: &[usize], frames: &Range<usize>) -> Vec<(Range<usize>, Range<usize>)> {
        let mut runs: Vec<(Range<usize>, Range<usize>)> = Vec::new();
        for &sample in sorted {
            let (stored, first) = (sample / self.pieces, sample % self.pieces * self.cut.unwrap_or(0));
            let frames = first + frames.start..first + frames.end;
            match runs.last_mut() {
                Some((run, own)) if run.end == stored && *own == frames => run.end += 1,
                _ => runs.push((stored..stored + 1, frames)),
            }
        }
        runs
    }
}

impl Dataset for ArrayDataset {
    fn path(&self) -> &Path {
        self.arrays.path()
    }

    fn samples(&self) -> usize {
        self.layout.samples * self.pieces
    }

    fn dims(&self) -> &[Dim] {
        &self.layout.dims
    }

    fn times(&self) -> Option<&[f64]> {
        self.times.as_deref()
    }

    fn uncut_times(&self) -> Option<&[f64]> {
        self.layout.times.as_deref().filter(|_| self.cut.is_some())
    }

    fn sample_times(&self) -> Option<Vec<f64>> {
        self.layout.sample_times.clone()
    }

    fn time_unit(&self) -> Option<&TimeUnit> {
        // The pieces of a trajectory that is cut have other times than the first one.
        self.layout.time_unit.as_ref().filter(|_| self.pieces == 1)
    }

    fn chunk(&self, variable: &str) -> Option<Vec<usize>> {
        let at = self.layout.described.iter().position(|known| known.name == variable)?;
        self.layout.variables.get(at)?.info.chunk.clone()
    }

    fn attributes(&self) -> TextAttributes {
        self.attributes.clone()
    }

    fn variables(&self) -> &[DataVariable] {
        &self.layout.described
    }

    fn left_out(&self) -> &[String] {
        &self.left_out
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let chosen = choose(self, variables)?;
        check_window(self, window, samples)?;
        let empty =
            samples.is_empty() || window.frames.is_empty() || window.points.iter().any(Range::is_empty);
        if empty {
            let channels: usize = chosen.iter().map(|variable| variable.channels.len()).sum();
            let shape: Vec<i64> = [samples.len(), window.frames.len(), channels]
                .into_iter()
                .chain(window.points.iter().map(Range::len))
                .map(|extent| extent as i64)
                .collect();
            return Ok(Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?);
        }
        let mut sorted = samples.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let runs = self.runs(&sorted, &window.frames);
        let read = |described: &DataVariable| -> Result<Tensor> {
            let known = self.layout.described.iter().position(|known| known.name == described.name);
            let variable = &self.layout.variables[known.unwrap_or_default()];
            let slab = |(samples, frames): &(Range<usize>, Range<usize>)| -> Result<Tensor> {
                let channels = variable.channels.iter();
                let levels = channels.map(|run| self.slab(variable, (samples, frames), run, &window.points));
                cat(levels.collect::<Result<_>>()?, 2)
            };
            cat(runs.iter().map(slab).collect::<Result<_>>()?, 0)
        };
        // An array that is repeated along an axis is not contiguous.
        let all = cat(chosen.iter().map(read).collect::<Result<_>>()?, 2)?.f_contiguous()?;
        if sorted == samples {
            return Ok(all);
        }
        let rows: Vec<i64> =
            samples.iter().map(|sample| sorted.partition_point(|other| other < sample) as i64).collect();
        Ok(all.f_index_select(0, &Tensor::f_from_slice(&rows)?)?)
    }
}

/// Numbers without a sign of those that are stored with one.
fn unsigned(wrap: Option<f64>, values: Values) -> Values {
    let Some(wrap) = wrap else { return values };
    let plain = |value: f64| if value < 0.0 { value + wrap } else { value };
    Values::F64(values.into_f64().into_iter().map(plain).collect())
}
