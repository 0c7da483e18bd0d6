//! Writes plain HDF5 and NetCDF-4: a dataset for each variable, with the names of its axes.

use std::ops::Range;
use std::path::Path;

use hdf5_metno::{Dataset, File};
use ndarray::ArrayView;

use super::atomic_file::AtomicFile;
use super::layout::hyperslab;
use super::scales::{attach_scales, make_scale};
use super::{text, texts, write_attribute};
use crate::attributes::TITLE;
use crate::content::{CHANNEL, ChannelAxis, Content, SAMPLE, StoredAxes, TIME, Texts, UNITS, of_times};
use crate::dataset_writer::DatasetWriter;
use crate::grid::DataVariable;
use crate::window_writer::{WindowStore, WindowWriter};
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

/// Creates an HDF5 file: `/<variable>` is `[sample, time, channel, x, …]`, without time for samples that have none, and without channel
/// for scalars; `/<dim>`, `/time` and levels are coordinates. The attribute `axes` of each dataset, or in NetCDF its
/// dimension scales, name its axes; the attribute `units` is its unit. The file is renamed into place once it is complete.
pub(crate) fn create(path: &Path, content: &Content, dialect: Dialect) -> Result<Box<dyn DatasetWriter>> {
    let layout = Layout { content, dialect };
    layout.check_names(path)?;
    let aside = AtomicFile::create(path)?;
    let failed = |error| Error::hdf5(path, "write its layout", error);
    layout.write_attributes(&aside)?;
    layout.create_coordinates(aside.file()).map_err(failed)?;
    let dataset = |variable: &DataVariable| {
        let axes = StoredAxes::new(content, variable);
        let chunk = content.storage.chunk(&axes.names(CHANNEL, &content.dims), &axes.shape())?;
        layout.create_variable(aside.file(), variable, chunk).map_err(failed)
    };
    let datasets = content.variables.iter().map(dataset).collect::<Result<Vec<Dataset>>>()?;
    Ok(Box::new(WindowWriter::new(PlainFile(aside), path, content, datasets)))
}

/// An unfinished file of plain HDF5 or NetCDF-4.
struct PlainFile(AtomicFile);

impl WindowStore for PlainFile {
    type Handle = Dataset;

    fn write(
        &self,
        dataset: &Dataset,
        variable: &str,
        window: &[Range<usize>],
        values: &[f32],
    ) -> Result<()> {
        let failed = |error| Error::hdf5(self.0.target(), format!("write dataset `{variable}`"), error);
        let extents: Vec<usize> = window.iter().map(Range::len).collect();
        let view = ArrayView::from_shape(extents, values).map_err(|error| failed(error.into()))?;
        dataset.write_slice(view, hyperslab(window)).map_err(failed)
    }

    fn finish(self, datasets: Vec<Dataset>) -> Result<()> {
        // Datasets are closed before their file.
        drop(datasets);
        self.0.finish()
    }
}

/// Structure of the file: attributes, coordinates and empty datasets.
struct Layout<'a> {
    content: &'a Content,
    dialect: Dialect,
}

impl Layout<'_> {
    /// Returns whether a channel axis has coordinates: if it has levels, and always in NetCDF, where each name of a dim has one extent.
    fn has_coordinates(&self, axis: &ChannelAxis<'_>) -> bool {
        axis.levels.is_some() || self.dialect == Dialect::NetCdf
    }

    /// Returns the channel axes that have coordinates.
    fn channel_axes(&self) -> Vec<ChannelAxis<'_>> {
        let axes = self.content.channel_axes().into_iter();
        axes.filter(|axis| self.has_coordinates(axis)).collect()
    }

    /// Rejects names of variables that no HDF5 link can have, or that coordinates have.
    fn check_names(&self, path: &Path) -> Result<()> {
        let Content { dims, variables, .. } = self.content;
        let channel_axes = self.channel_axes();
        let taken = |name: &str| {
            name == TIME
                || dims.iter().any(|dim| dim.name == name)
                || channel_axes.iter().any(|axis| axis.name == name)
                || self.dialect == Dialect::NetCdf && name == SAMPLE
        };
        let wrong = variables.iter().find(|variable| !is_link(&variable.name) || taken(&variable.name));
        let Some(variable) = wrong else { return Ok(()) };
        Err(Error::Invalid(format!(
            "{:?} cannot be the name of a variable in {}: it is empty, has a `/`, or is the name of a coordinate; give it another name, as in --set \
             'data.FORMAT.variables={{ t2m = \"group/t2m\" }}', and name it in data.fields",
            variable.name,
            path.display()
        )))
    }

    fn write_attributes(&self, aside: &AtomicFile) -> Result<()> {
        let meta = &self.content.meta;
        match self.dialect {
            Dialect::Plain => write_attribute(aside, "dataset_name", &meta.name)?,
            Dialect::NetCdf => {
                write_attribute(aside, "Conventions", "CF-1.10")?;
                if !meta.attributes.iter().any(|(name, _)| name == TITLE) {
                    write_attribute(aside, TITLE, &meta.name)?;
                }
            }
        }
        meta.attributes.iter().try_for_each(|(name, text)| write_attribute(aside, name, text))
    }

    /// Creates the coordinates of dims, times, samples and channels.
    fn create_coordinates(&self, file: &File) -> hdf5_metno::Result<()> {
        let Content { meta, dims, time_unit, .. } = self.content;
        for dim in dims {
            let dataset = self.coordinates(file, &dim.name, &dim.coordinates, &dim.attributes())?;
            if dim.periodic {
                super::number(&dataset, PERIODIC, true)?;
            }
        }
        if !meta.times.is_empty() {
            let _ = self.coordinates(file, TIME, &meta.times, &of_times(time_unit.as_ref(), true))?;
        }
        if self.dialect == Dialect::NetCdf {
            let _ = self.coordinates(file, SAMPLE, &meta.numbers(), &Texts::new())?;
        }
        for axis in &self.channel_axes() {
            let dataset = self.coordinates(file, &axis.name, &axis.values(), &axis.attributes())?;
            super::number(&dataset, CHANNELS, true)?;
        }
        if !meta.sample_times.is_empty() {
            let dataset = create_numbers(file, TIME, &meta.sample_times)?;
            self.name_axes(file, &dataset, &[SAMPLE])?;
            write_texts(&dataset, &of_times(time_unit.as_ref(), false))?;
        }
        Ok(())
    }

    fn coordinates(
        &self,
        file: &File,
        name: &str,
        values: &[f64],
        attributes: &Texts<'_>,
    ) -> hdf5_metno::Result<Dataset> {
        let dataset = create_numbers(file, name, values)?;
        match self.dialect {
            Dialect::Plain => texts(&dataset, AXES, [name].into_iter())?,
            Dialect::NetCdf => make_scale(&dataset, name)?,
        }
        write_texts(&dataset, attributes)?;
        Ok(dataset)
    }

    fn create_variable(
        &self,
        file: &File,
        variable: &DataVariable,
        chunk: Option<Vec<usize>>,
    ) -> hdf5_metno::Result<Dataset> {
        let Content { meta, dims, storage, .. } = self.content;
        let own = StoredAxes::new(self.content, variable);
        let mut builder = file.new_dataset_builder().obj_track_times(false).empty::<f32>().shape(own.shape());
        if let Some(chunk) = chunk {
            builder = builder.chunk(chunk);
        }
        if let Some(level) = storage.deflate {
            builder = builder.shuffle().deflate(level);
        }
        let dataset = builder.create(variable.name.as_str())?;
        let channel = self.content.channel_axis(variable).filter(|axis| self.has_coordinates(axis));
        let axes = own.names(channel.as_ref().map_or(CHANNEL, |axis| &axis.name), dims);
        self.name_axes(file, &dataset, &axes.iter().map(String::as_str).collect::<Vec<&str>>())?;
        if variable.has_channel_axis() {
            text(&dataset, COMPONENTS, &variable.channels.join(" "))?;
        }
        if let Some(unit) = &variable.unit {
            text(&dataset, UNITS, unit)?;
        }
        variable.stored_attributes().try_for_each(|(name, own)| text(&dataset, name, own))?;
        if self.dialect == Dialect::NetCdf && !meta.sample_times.is_empty() {
            text(&dataset, COORDINATES, TIME)?;
        }
        if self.dialect == Dialect::NetCdf && meta.missing {
            super::number(&dataset, FILL, f32::NAN)?;
        }
        Ok(dataset)
    }

    /// Stores the names of a dataset's axes.
    fn name_axes(&self, file: &File, dataset: &Dataset, axes: &[&str]) -> hdf5_metno::Result<()> {
        match self.dialect {
            Dialect::Plain => texts(dataset, AXES, axes.iter().copied()),
            Dialect::NetCdf => attach_scales(&file.group("/")?, dataset, axes.iter().copied()),
        }
    }
}

/// Creates a dataset of one axis, float64.
fn create_numbers(file: &File, name: &str, values: &[f64]) -> hdf5_metno::Result<Dataset> {
    file.new_dataset_builder().obj_track_times(false).with_data(values).create(name)
}

/// Writes attributes.
pub(crate) fn write_texts(dataset: &Dataset, attributes: &Texts<'_>) -> hdf5_metno::Result<()> {
    attributes.iter().try_for_each(|(name, own)| text(dataset, name, own))
}

/// Returns whether a name can be that of a link.
fn is_link(name: &str) -> bool {
    !name.is_empty() && name != "." && !name.contains(['/', '\0'])
}
