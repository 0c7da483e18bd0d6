//! Content and storage of data sets to write.

mod axes;
mod coordinates;

use std::collections::BTreeMap;

use crate::calendar::TimeUnit;
use crate::grid::{DataVariable, Dim, Levels, PredictionMeta};
use crate::{Error, Result};

pub(crate) use self::axes::{Checked, StoredAxes};
pub(crate) use self::coordinates::{Texts, UNITS, of_times};

/// Content of a data set to write, except its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Content {
    /// Names, times, attributes.
    pub meta: PredictionMeta,
    /// Unit of the times, such as `hours since 2000-01-01`, and their calendar.
    pub time_unit: Option<TimeUnit>,
    /// Spatial dims.
    pub dims: Vec<Dim>,
    /// Variables, in the order of `meta.variables`.
    pub variables: Vec<DataVariable>,
    /// [Parameters](crate::Dataset::parameters) of all samples, by name, for layouts that store some.
    pub parameters: Vec<(String, f64)>,
    /// Storage of the values.
    pub storage: Storage,
}

/// Storage of the values of a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storage {
    /// Extent of the chunks along named axes: `sample`, `time`, `channel` and the spatial dims. Along others a chunk has one sample,
    /// one time, and all else. Values are stored without chunks if it is empty and nothing is compressed.
    pub chunks: BTreeMap<String, usize>,
    /// Level of deflate, 1 to 9, with shuffled bytes.
    pub deflate: Option<u8>,
}

impl Content {
    /// Returns the bytes of all values in float32.
    pub fn bytes(&self) -> u64 {
        let bytes = |variable: &DataVariable| {
            let shape = StoredAxes::new(self, variable).shape();
            shape
                .into_iter()
                .chain([size_of::<f32>()])
                .fold(1, |bytes: u64, extent| bytes.saturating_mul(extent as u64))
        };
        self.variables.iter().map(bytes).fold(0, u64::saturating_add)
    }
}

/// Axis of the channels of some variables.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ChannelAxis<'a> {
    /// Name: that of the levels, or `channel`.
    pub(crate) name: String,
    /// Number of channels.
    pub(crate) count: usize,
    /// Coordinates, if the channels have some.
    pub(crate) levels: Option<&'a Levels>,
}

impl ChannelAxis<'_> {
    /// Coordinates, or the numbers of the channels.
    pub(crate) fn values(&self) -> Vec<f64> {
        match self.levels {
            Some(levels) => levels.values.clone(),
            None => (0..self.count).map(|at| at as f64).collect(),
        }
    }

    /// Unit of the coordinates.
    pub(crate) fn unit(&self) -> Option<&str> {
        self.levels.and_then(|levels| levels.unit.as_deref())
    }
}

impl Content {
    /// The axes of channels, each once, for formats where an axis has one extent and one list of coordinates.
    pub(crate) fn channel_axes(&self) -> Vec<ChannelAxis<'_>> {
        let mut axes: Vec<ChannelAxis<'_>> = Vec::new();
        for variable in self.variables.iter().filter(|variable| variable.has_channel_axis()) {
            let (count, levels) = (variable.channels.len(), variable.levels.as_ref());
            if !axes.iter().any(|axis| (axis.count, axis.levels) == (count, levels)) {
                let name = levels.map_or(CHANNEL, |levels| &levels.name).to_owned();
                axes.push(ChannelAxis { name, count, levels });
            }
        }
        let names: Vec<String> = axes.iter().map(|axis| axis.name.clone()).collect();
        for (at, axis) in axes.iter_mut().enumerate() {
            let is_own = |name: &&String| **name == axis.name;
            let (before, all) =
                (names[..at].iter().filter(is_own).count(), names.iter().filter(is_own).count());
            match axis.levels {
                None if all > 1 => axis.name = format!("{CHANNEL}_{}", axis.count),
                Some(_) if before > 0 => axis.name = format!("{}_{}", axis.name, before + 1),
                _ => (),
            }
        }
        axes
    }

    /// The axis of a variable's channels, of [`Content::channel_axes`].
    pub(crate) fn channel_axis(&self, variable: &DataVariable) -> Option<ChannelAxis<'_>> {
        let own = (variable.channels.len(), variable.levels.as_ref());
        let axes = variable.has_channel_axis().then(|| self.channel_axes())?;
        axes.into_iter().find(|axis| (axis.count, axis.levels) == own)
    }
}

/// Returns the coordinates of dims, times and levels by name, for formats that hold nothing but arrays.
pub(crate) fn coordinate_arrays(content: &Content) -> Vec<(String, Vec<f64>)> {
    let meta = &content.meta;
    let dims = content.dims.iter().map(|dim| (dim.name.clone(), dim.coordinates.clone()));
    let times = if meta.sample_times.is_empty() { &meta.times } else { &meta.sample_times };
    let times = (!times.is_empty()).then(|| (TIME.to_owned(), times.clone()));
    let levels = content.channel_axes();
    let levels = levels.iter().filter_map(|axis| Some((axis.name.clone(), axis.levels?.values.clone())));
    dims.chain(times).chain(levels).collect()
}

impl Storage {
    /// Extents of a chunk of an array with these axes; `None` for contiguous storage.
    ///
    /// # Errors
    /// A chunk of extent 0, or a level outside 1 to 9.
    pub fn chunk(&self, axes: &[impl AsRef<str>], shape: &[usize]) -> Result<Option<Vec<usize>>> {
        if let Some((name, _)) = self.chunks.iter().find(|(_, extent)| **extent == 0) {
            return Err(Error::Invalid(format!(
                "the chunks have extent 0 along `{name}`, expected at least 1"
            )));
        }
        if let Some(level) = self.deflate.filter(|level| !(1..=9).contains(level)) {
            return Err(Error::Invalid(format!("the level of deflate is {level}, expected 1 to 9")));
        }
        if self.chunks.is_empty() && self.deflate.is_none() {
            return Ok(None);
        }
        let extent = |(axis, &extent): (&str, &usize)| {
            let default = if [SAMPLE, TIME].contains(&axis) { 1 } else { extent };
            self.chunks.get(axis).copied().unwrap_or(default).clamp(1, extent.max(1))
        };
        Ok(Some(axes.iter().map(AsRef::as_ref).zip(shape).map(extent).collect()))
    }

    /// Rejects settings that a format without chunks and compression cannot hold.
    ///
    /// # Errors
    /// Any setting.
    pub fn none(&self, format: &str) -> Result<()> {
        if *self == Self::default() {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "files of the format {format} have neither chunks nor compression; write hdf5, netcdf or zarr"
        )))
    }
}

/// Name of the axis of samples.
pub(crate) const SAMPLE: &str = "sample";
/// Name of the axis of times, and of the variable of the times of samples without frames.
pub(crate) const TIME: &str = "time";
/// Name of the axis of channels without coordinates.
pub(crate) const CHANNEL: &str = "channel";
