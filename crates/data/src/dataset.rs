//! The face that every data format has.

use std::fmt::Debug;
use std::ops::Range;
use std::path::{Path, PathBuf};

use tch::{Kind, Tensor};

use crate::area::PointWeights;
use crate::attributes::TextAttributes;
use crate::boxes::check_range;
use crate::calendar::TimeUnit;
use crate::content::{Content, Storage};
use crate::dataset_writer::DatasetWriter;
use crate::grid::{DataVariable, Dim, PredictionMeta};
use crate::hdf5::plain::{self, Dialect};
use crate::stats::ChannelStatistics;
use crate::{Error, Result, Statistics};

/// A part of each sample to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Frames of each trajectory; `0..1` for samples without time.
    pub frames: Range<usize>,
    /// Points along each spatial dim.
    pub points: Vec<Range<usize>>,
}

impl Window {
    /// One frame of a range of points along each spatial dim, for samples without time.
    pub fn still(points: &[Range<usize>]) -> Self {
        Self { frames: 0..1, points: points.to_vec() }
    }
}

/// Samples on a grid, in a file or a folder: pairs of fields, or trajectories of frames.
///
/// An open data set of any [`Format`](crate::Format); training, prediction and pictures know nothing else of the format.
/// [`open`](crate::DataConfig::open) finds it by `data.format`.
///
/// Nothing here is collective: each rank opens the data set and reads its own window. Whatever is wrong must be an error
/// that names the file, the variable and the cause. Metadata is checked when a data set is opened, values when they are
/// read.
pub trait Dataset: Debug + Send + Sync {
    /// Path of the file or folder, as given.
    fn path(&self) -> &Path;

    /// The files or folders that hold the data.
    fn files(&self) -> Vec<PathBuf> {
        vec![self.path().to_owned()]
    }

    /// Name of the data set.
    fn name(&self) -> String {
        self.path().file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }

    /// Number of samples or trajectories, at least 1.
    fn samples(&self) -> usize;

    /// Spatial dims, 1 to 3, in the order in which fields have them.
    fn dims(&self) -> &[Dim];

    /// Times of the frames, the same for each trajectory; `None` for samples without time.
    fn times(&self) -> Option<&[f64]> {
        None
    }

    /// First sample and frame of each file; of one file `[(0, 0)]`.
    fn file_starts(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    /// Times of the stored trajectories, if samples are pieces into which these are cut.
    fn uncut_times(&self) -> Option<&[f64]> {
        None
    }

    /// Time of each sample, for samples without frames that have one, in the unit of [`Dataset::time_unit`].
    fn sample_times(&self) -> Option<Vec<f64>> {
        None
    }

    /// Unit and calendar of the times, if the data store them.
    fn time_unit(&self) -> Option<&TimeUnit> {
        None
    }

    /// Extents of the chunks in which a variable is stored, one for each axis that is stored; `None` for contiguous storage.
    fn chunk(&self, _variable: &str) -> Option<Vec<usize>> {
        None
    }

    /// Attributes of CF of the data set, such as its history; of several files those of the first.
    fn attributes(&self) -> TextAttributes {
        TextAttributes::default()
    }

    /// Variables that can be read.
    fn variables(&self) -> &[DataVariable];

    /// Returns the arrays that are left out if no variable is named, each with its axes: their spatial dims differ from those of
    /// the variables.
    fn left_out(&self) -> &[String] {
        &[]
    }

    /// Names of the variables that a network maps from and to if `data.inputs` and `data.targets` name none, for samples
    /// without time.
    fn default_pair(&self) -> Option<[&str; 2]> {
        None
    }

    /// Reads a window of some samples, in the order requested, as float32 on the CPU: `[sample, frame, channel, x, …]`.
    /// The channels are those of the variables, one variable after the other. Reads no other part of the data, except the
    /// rest of compressed chunks that the window touches. Any range may be empty, as a rank's part may be.
    ///
    /// # Errors
    /// A variable, sample or range that does not exist, data that cannot be read, or a value in the window that is not
    /// finite: the error names the variable and the index of the first such value.
    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor>;

    /// Computes statistics of each channel over all frames and points of a range of samples, in float64, with bounded
    /// memory. Points are weighted by the area of their cells where a dim has latitudes ([`area_weights`](crate::area_weights)).
    /// Missing values, NaN, are left out; a channel all of whose values are missing has `None`.
    ///
    /// # Errors
    /// Those of [`Dataset::read`], and an empty range.
    fn statistics(&self, variables: &[&str], samples: Range<usize>) -> Result<Vec<Option<Statistics>>> {
        weighted_statistics(self, variables, samples)
    }

    /// Computes statistics of each channel's changes from one frame to the next, like [`Dataset::statistics`]. A change is missing
    /// where one of the two values is.
    ///
    /// # Errors
    /// Those of [`Dataset::statistics`]; formats may refuse trajectories with a single frame, which have no changes.
    fn change_statistics(
        &self,
        variables: &[&str],
        samples: Range<usize>,
    ) -> Result<Vec<Option<Statistics>>> {
        weighted_change_statistics(self, variables, samples)
    }

    /// Creates an HDF5 file of predictions like this data set. The default is a plain one, which the format `hdf5` reads:
    /// a dataset for each variable, with the names of its axes and its unit as attributes.
    ///
    /// # Errors
    /// Content that the layout cannot hold, or a file that cannot be created.
    fn create(&self, path: &Path, meta: &PredictionMeta) -> Result<Box<dyn DatasetWriter>> {
        plain::create(path, &self.content(meta)?, Dialect::Plain)
    }

    /// Numbers of the file as a whole that [`Dataset::create`] writes again, such as parameters of a simulation.
    fn parameters(&self) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// Describes fields like these, which vary in space and time, for a [`WriterFormat`](crate::WriterFormat).
    ///
    /// # Errors
    /// A variable that the data set does not have.
    fn content(&self, meta: &PredictionMeta) -> Result<Content> {
        let names: Vec<&str> = meta.variables.iter().map(String::as_str).collect();
        let variables = choose(self, &names)?.into_iter().map(DataVariable::varying).collect();
        let mut parameters = self.parameters();
        parameters.retain(|(name, _)| !meta.left_out.contains(name));
        Ok(Content {
            meta: PredictionMeta { attributes: self.attributes().with(&meta.attributes), ..meta.clone() },
            time_unit: self.time_unit().cloned(),
            dims: self.dims().to_vec(),
            variables,
            parameters,
            storage: Storage::default(),
        })
    }
}

/// Computes what [`Dataset::statistics`] does by default, of values that are read once.
pub(crate) fn weighted_statistics(
    data: &(impl Dataset + ?Sized),
    variables: &[&str],
    samples: Range<usize>,
) -> Result<Vec<Option<Statistics>>> {
    over_points(data, variables, |variables, points| {
        let (mut all, weights) = (ChannelStatistics::default(), PointWeights::new(data.dims()));
        for (samples, frames) in portions(data, &samples, variables)? {
            for points in blocks(points, channels(data, variables)? * samples.len() * frames.len()) {
                let weights = weights.within(&points);
                let window = Window { frames: frames.clone(), points };
                all.push(&data.read(&window, &samples, variables)?.f_flatten(0, 1)?, &weights)?;
            }
        }
        all.finish()
    })
}

/// Computes what [`Dataset::change_statistics`] does by default.
pub(crate) fn weighted_change_statistics(
    data: &(impl Dataset + ?Sized),
    variables: &[&str],
    samples: Range<usize>,
) -> Result<Vec<Option<Statistics>>> {
    over_points(data, variables, |variables, points| {
        let (mut all, weights) = (ChannelStatistics::default(), PointWeights::new(data.dims()));
        for (samples, frames) in portions(data, &samples, variables)? {
            // One frame more: the changes to the first frame of the next portion belong to this one.
            let end = (frames.end + 1).min(frame_count(data));
            let steps = (end - frames.start - 1) as i64;
            for points in blocks(points, channels(data, variables)? * samples.len() * frames.len()) {
                let weights = weights.within(&points);
                let window = Window { frames: frames.start..end, points };
                let values = data.read(&window, &samples, variables)?.f_to_kind(Kind::Double)?;
                let changes = values.f_narrow(1, 1, steps)?.f_sub(&values.f_narrow(1, 0, steps)?)?;
                all.push(&changes.f_flatten(0, 1)?, &weights)?;
            }
        }
        all.finish()
    })
}

/// Computes statistics over all points of variables with spatial dims, and over one point of those without.
fn over_points(
    data: &(impl Dataset + ?Sized),
    variables: &[&str],
    of: impl Fn(&[&str], &[Range<usize>]) -> Result<Vec<Option<Statistics>>>,
) -> Result<Vec<Option<Statistics>>> {
    let chosen = choose(data, variables)?;
    let mut all = Vec::new();
    for group in chosen.chunk_by(|one, other| one.uniform == other.uniform) {
        let names: Vec<&str> = group.iter().map(|variable| variable.name.as_str()).collect();
        let mut points = full(data);
        if group.iter().all(|variable| variable.uniform) {
            points.iter_mut().for_each(|range| range.end = range.end.min(1));
        }
        all.extend(of(&names, &points)?);
    }
    Ok(all)
}

/// Finds variables by their names.
///
/// # Errors
/// No name, or one that the data set does not have; the error lists those that it has.
pub fn choose(data: &(impl Dataset + ?Sized), names: &[&str]) -> Result<Vec<DataVariable>> {
    if names.is_empty() {
        return Err(Error::Invalid("at least one field must be asked for".to_owned()));
    }
    let find = |name: &&str| {
        let found = data.variables().iter().find(|variable| variable.name == *name).cloned();
        found.ok_or_else(|| Error::MissingField {
            path: data.path().to_owned(),
            field: (*name).to_owned(),
            found: data.variables().iter().map(|variable| variable.name.clone()).collect(),
        })
    };
    names.iter().map(find).collect()
}

/// Checks a window against the extents of a data set.
///
/// # Errors
/// Another number of ranges than spatial dims, or a range or sample that does not exist.
pub fn check_window(data: &(impl Dataset + ?Sized), window: &Window, samples: &[usize]) -> Result<()> {
    let available = data.samples();
    let what = if data.times().is_some() { "trajectory" } else { "sample" };
    if let Some(sample) = samples.iter().find(|&&sample| sample >= available) {
        return Err(Error::OutOfRange { what: what.to_owned(), asked: sample.to_string(), available });
    }
    check_range("frame range", &window.frames, frame_count(data))?;
    let dims = data.dims();
    if window.points.len() != dims.len() {
        let names: Vec<&str> = dims.iter().map(|dim| dim.name.as_str()).collect();
        return Err(Error::Invalid(format!(
            "a window of {} ranges was asked for where there are {} spatial dims: {}",
            window.points.len(),
            dims.len(),
            names.join(", ")
        )));
    }
    for (dim, range) in dims.iter().zip(&window.points) {
        check_range(format!("{} range", dim.name), range, dim.coordinates.len())?;
    }
    Ok(())
}

/// Joins tensors along a dim; a single one is not copied.
pub(crate) fn cat(mut parts: Vec<Tensor>, dim: i64) -> Result<Tensor> {
    match parts.len() {
        1 => Ok(parts.remove(0)),
        _ => Ok(Tensor::f_cat(&parts, dim)?),
    }
}

/// Number of frames of each trajectory; 1 without time.
pub(crate) fn frame_count(data: &(impl Dataset + ?Sized)) -> usize {
    data.times().map_or(1, <[f64]>::len)
}

/// All points.
fn full(data: &(impl Dataset + ?Sized)) -> Vec<Range<usize>> {
    data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect()
}

/// Number of channels of some variables together.
fn channels(data: &(impl Dataset + ?Sized), variables: &[&str]) -> Result<usize> {
    Ok(choose(data, variables)?.iter().map(|variable| variable.channels.len()).sum())
}

/// Cuts a window along its first dim into blocks of about 64 MiB, of at least one row each. `values` is the number of values at a point.
pub(crate) fn blocks(points: &[Range<usize>], values: usize) -> Vec<Vec<Range<usize>>> {
    let Some((first, others)) = points.split_first() else { return vec![Vec::new()] };
    let bytes = values.saturating_mul(size_of::<f32>());
    let row = others.iter().fold(bytes, |bytes, range| bytes.saturating_mul(range.len()));
    let rows = (PORTION / row.max(1)).max(1);
    let block = |start: usize| {
        let own = start..first.end.min(start.saturating_add(rows));
        std::iter::once(own).chain(others.iter().cloned()).collect()
    };
    first.clone().step_by(rows).map(block).collect()
}

/// Samples and frames to read at a time for statistics.
fn portions(
    data: &(impl Dataset + ?Sized),
    samples: &Range<usize>,
    variables: &[&str],
) -> Result<Vec<(Vec<usize>, Range<usize>)>> {
    check_range("sample range", samples, data.samples())?;
    let points: usize = data.dims().iter().map(|dim| dim.coordinates.len()).product();
    let frame = channels(data, variables)?.saturating_mul(points).saturating_mul(size_of::<f32>()).max(1);
    let frames = frame_count(data);
    let step = (PORTION / frame).clamp(1, frames.max(1));
    let together = (PORTION / frame.saturating_mul(step)).max(1);
    let mut portions = Vec::new();
    for first in samples.clone().step_by(together) {
        let samples: Vec<usize> = (first..samples.end.min(first + together)).collect();
        let starts = (0..frames).step_by(step);
        portions.extend(starts.map(|start| (samples.clone(), start..(start + step).min(frames))));
    }
    Ok(portions)
}

/// Bytes read at a time for statistics, about.
const PORTION: usize = 64 << 20;
