//! Writes plain HDF5: a dataset for each variable, with the names of its axes.

use std::ops::Range;
use std::path::Path;

use hdf5_metno::Dataset;
use ndarray::ArrayView;
use tch::Tensor;

use super::atomic_file::AtomicFile;
use super::layout::hyperslab;
use super::scales::{attach_scales, make_scale};
use super::{text, texts, write_attribute};
use crate::attributes::TITLE;
use crate::content::{
    CHANNEL, ChannelAxis, Content, SAMPLE, StoredAxes, TIME, Texts, UNITS, Written, of_times,
};
use crate::grid::{DataVariable, PredictionMeta};
use crate::{Error, Result};

/// Attribute of a dataset: names of its axes, in order.
pub(crate) const AXES: &str = "axes";
/// Attribute of coordinates: whether the first point follows the last.
pub(crate) const PERIODIC: &str = "periodic";
/// Attribute of coordinates: whether they are those of channels, such as levels.
pub(crate) const CHANNELS: &str = "channels";
/// Attribute of a variable: names of its channels, between blanks.
pub(crate) const COMPONENTS: &str = "components";
/// CF's attribute of a variable: the number that stands for missing values.
const FILL: &str = "_FillValue";
/// CF's attribute of a variable: names of its auxiliary coordinate variables.
pub(crate) const COORDINATES: &str = "coordinates";

/// Conventions of a file's attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// The attribute `axes` names the axes of a dataset.
    Plain,
    /// NetCDF-4: dimension scales name them, with the attributes of CF.
    NetCdf,
}

/// An HDF5 file: `/<variable>` is `[sample, time, channel, x, …]`, without time for samples that have none, and without channel
/// for scalars; `/<dim>`, `/time` and levels are coordinates. The attribute `axes` of each dataset names its axes, or dimension scales do,
/// and `units` its unit. It takes its name in `finish`.
#[derive(Debug)]
pub(crate) struct PlainWriter {
    aside: AtomicFile,
    variables: Written<Dataset>,
}

impl PlainWriter {
    pub(crate) fn create(path: &Path, content: &Content, dialect: Dialect) -> Result<Self> {
        let Content { meta, dims, variables, storage, .. } = content;
        // A dim of netCDF has one extent, and always coordinates here.
        let has_coordinates = |axis: &ChannelAxis<'_>| axis.levels.is_some() || dialect == Dialect::NetCdf;
        let channel_axes = content.channel_axes().into_iter().filter(has_coordinates).collect::<Vec<_>>();
        let channel = |variable: &DataVariable| {
            let axis = content.channel_axis(variable)?;
            Some(if has_coordinates(&axis) { axis.name } else { CHANNEL.to_owned() })
        };
        let taken = |name: &str| {
            name == TIME
                || dims.iter().any(|dim| dim.name == name)
                || channel_axes.iter().any(|axis| axis.name == name)
                || dialect == Dialect::NetCdf && name == SAMPLE
        };
        if let Some(variable) =
            variables.iter().find(|variable| !is_link(&variable.name) || taken(&variable.name))
        {
            return Err(Error::Invalid(format!(
                "{:?} cannot be the name of a variable in {}: it has a `/`, or is that of a coordinate; give it another name, as in --set \
                 'data.FORMAT.variables={{ t2m = \"group/t2m\" }}', and name it in data.fields",
                variable.name,
                path.display()
            )));
        }
        let aside = AtomicFile::create(path)?;
        let failed = |error| Error::hdf5(path, "write its layout", error);
        let frames = (!meta.times.is_empty()).then_some(meta.times.len());
        let file = Layout { aside: &aside, dialect };
        file.attributes(meta)?;
        for dim in dims {
            let dataset = file.coordinates(&dim.name, &dim.coordinates, &dim.attributes()).map_err(failed)?;
            if dim.periodic {
                super::number(&dataset, PERIODIC, true).map_err(failed)?;
            }
        }
        if frames.is_some() {
            let about = of_times(content.time_unit.as_ref(), true);
            file.coordinates(TIME, &meta.times, &about).map_err(failed)?;
        }
        if dialect == Dialect::NetCdf {
            file.coordinates(SAMPLE, &meta.numbers(), &Texts::new()).map_err(failed)?;
        }
        for axis in &channel_axes {
            let dataset = file.coordinates(&axis.name, &axis.values(), &axis.attributes()).map_err(failed)?;
            super::number(&dataset, CHANNELS, true).map_err(failed)?;
        }
        if !meta.sample_times.is_empty() {
            file.sample_times(&meta.sample_times, &of_times(content.time_unit.as_ref(), false))
                .map_err(failed)?;
        }
        let mut written = Written::new(path, content);
        for variable in variables {
            let (own, channel) = (StoredAxes::new(content, variable), channel(variable));
            let shape = own.shape();
            let chunk = storage.chunk(&own.names(CHANNEL, dims), &shape)?;
            let axes = own.names(channel.as_deref().unwrap_or(CHANNEL), dims);
            let dataset = file.variable(variable, &axes, &shape, chunk, storage.deflate).map_err(failed)?;
            if dialect == Dialect::NetCdf && !meta.sample_times.is_empty() {
                text(&dataset, COORDINATES, TIME).map_err(failed)?;
            }
            if dialect == Dialect::NetCdf && meta.missing {
                super::number(&dataset, FILL, f32::NAN).map_err(failed)?;
            }
            written.add(content, variable, dataset);
        }
        Ok(Self { aside, variables: written })
    }

    /// Writes a window of consecutive frames of one variable and sample: `[frame, channel, x, …]`.
    pub(crate) fn write(
        &mut self,
        variable: &str,
        (sample, first): (usize, usize),
        points: &[Range<usize>],
        values: &Tensor,
    ) -> Result<()> {
        let path = self.aside.target();
        self.variables.write(variable, (sample, first), points, values, |dataset, window, stored| {
            let failed = |error| Error::hdf5(path, format!("write dataset `{variable}`"), error);
            let extents: Vec<usize> = window.iter().map(Range::len).collect();
            let view = ArrayView::from_shape(extents, stored).map_err(|error| failed(error.into()))?;
            dataset.write_slice(view, hyperslab(window)).map_err(failed)
        })
    }

    /// All points of a variable.
    pub(crate) fn points(&self, variable: &str) -> Vec<Range<usize>> {
        self.variables.points(variable)
    }

    /// Puts the file in its place.
    pub(crate) fn finish(self) -> Result<()> {
        // Datasets are closed before their file.
        drop(self.variables.finish()?);
        self.aside.finish()
    }
}

/// Writes everything but values.
struct Layout<'a> {
    aside: &'a AtomicFile,
    dialect: Dialect,
}

impl Layout<'_> {
    fn attributes(&self, meta: &PredictionMeta) -> Result<()> {
        match self.dialect {
            Dialect::Plain => write_attribute(self.aside, "dataset_name", &meta.name)?,
            Dialect::NetCdf => {
                write_attribute(self.aside, "Conventions", "CF-1.10")?;
                if !meta.attributes.iter().any(|(name, _)| name == TITLE) {
                    write_attribute(self.aside, TITLE, &meta.name)?;
                }
            }
        }
        meta.attributes.iter().try_for_each(|(name, text)| write_attribute(self.aside, name, text))
    }

    fn coordinates(&self, name: &str, values: &[f64], attributes: &Texts<'_>) -> hdf5_metno::Result<Dataset> {
        let builder = self.aside.file().new_dataset_builder().obj_track_times(false);
        let dataset = builder.with_data(values).create(name)?;
        match self.dialect {
            Dialect::Plain => texts(&dataset, AXES, [name].into_iter())?,
            Dialect::NetCdf => make_scale(&dataset, name)?,
        }
        attributes.iter().try_for_each(|(name, own)| text(&dataset, name, own))?;
        Ok(dataset)
    }

    /// The time of each sample.
    fn sample_times(&self, times: &[f64], attributes: &Texts<'_>) -> hdf5_metno::Result<()> {
        let file = self.aside.file();
        let dataset = file.new_dataset_builder().obj_track_times(false).with_data(times).create(TIME)?;
        match self.dialect {
            Dialect::Plain => texts(&dataset, AXES, [SAMPLE].into_iter())?,
            Dialect::NetCdf => attach_scales(&file.group("/")?, &dataset, [SAMPLE].into_iter())?,
        }
        attributes.iter().try_for_each(|(name, own)| text(&dataset, name, own))
    }

    fn variable(
        &self,
        variable: &DataVariable,
        axes: &[String],
        shape: &[usize],
        chunk: Option<Vec<usize>>,
        deflate: Option<u8>,
    ) -> hdf5_metno::Result<Dataset> {
        let mut builder =
            self.aside.file().new_dataset_builder().obj_track_times(false).empty::<f32>().shape(shape);
        if let Some(chunk) = chunk {
            builder = builder.chunk(chunk);
        }
        if let Some(level) = deflate {
            builder = builder.shuffle().deflate(level);
        }
        let dataset = builder.create(variable.name.as_str())?;
        match self.dialect {
            Dialect::Plain => texts(&dataset, AXES, axes.iter().map(String::as_str))?,
            Dialect::NetCdf => {
                attach_scales(&self.aside.file().group("/")?, &dataset, axes.iter().map(String::as_str))?;
            }
        }
        if variable.has_channel_axis() {
            text(&dataset, COMPONENTS, &variable.channels.join(" "))?;
        }
        if let Some(unit) = &variable.unit {
            text(&dataset, UNITS, unit)?;
        }
        variable.stored_attributes().try_for_each(|(name, own)| text(&dataset, name, own))?;
        Ok(dataset)
    }
}

/// Returns whether a name can be that of a link.
fn is_link(name: &str) -> bool {
    !name.is_empty() && name != "." && !name.contains(['/', '\0'])
}
