//! Writes trajectories in PDEBench's layouts.

use std::ops::Range;
use std::path::Path;

use hdf5_metno::{Dataset, Group};
use ndarray::{ArrayView, IxDyn};

use super::arrays::{DIMS, FIELDS};
use crate::content::{Content, StoredAxes, Texts, UNITS, of_times};
use crate::dataset_writer::DatasetWriter;
use crate::grid::DataVariable;
use crate::hdf5::atomic_file::AtomicFile;
use crate::hdf5::layout::hyperslab;
use crate::hdf5::plain::{COMPONENTS, write_texts};
use crate::hdf5::{text, write_attribute};
use crate::window_writer::{WindowStore, WindowWriter};
use crate::writers::WriterFormat;
use crate::{Error, Result, register_writer};

/// An unfinished file in the layout that holds the variables: a dataset for each scalar of compressible flow, or `tensor` for any one scalar; `velocity`
/// and `particles` of incompressible flow in 2-D; a group for each sample for any other variable with channels. The file is renamed
/// into place once it is complete.
struct PdeBenchFile(AtomicFile);

/// Place of a variable's values.
enum Place {
    /// `[sample, time, x, …]`.
    Scalar(Dataset),
    /// `[sample, time, x, …, channel]`.
    Channels(Dataset),
    /// For each sample `[time, x, …, channel]`.
    Groups(Vec<Dataset>),
}

/// Layout of a file: see [`super::arrays`].
enum Layout {
    Fields,
    Flow,
    Groups,
}

register_writer!(PdeBenchFile);

impl WriterFormat for PdeBenchFile {
    const NAME: &'static str = "pdebench";
    const SUMMARY: &'static str =
        "HDF5 in PDEBench's layouts, for trajectories in 1 to 3 dims, with x, y, z as the names of dims.";

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        content.storage.none(Self::NAME)?;
        let layout = layout(content)?;
        let file = AtomicFile::create(path)?;
        let failed = |error| Error::hdf5(path, "write its layout", error);
        let root = file.file().group("/").map_err(failed)?;
        let place = |variable: &DataVariable| {
            let place = match layout {
                Layout::Fields => scalar(&root, content, variable),
                Layout::Flow => {
                    dataset(&root, &variable.name, &channels_last(content, variable)).map(Place::Channels)
                }
                Layout::Groups => groups(&root, content, variable),
            }?;
            place.describe(variable)?;
            Ok(place)
        };
        let places =
            content.variables.iter().map(place).collect::<hdf5_metno::Result<_>>().map_err(failed)?;
        coordinates(&root, content, &layout).map_err(failed)?;
        for (name, number) in &content.parameters {
            crate::hdf5::number(&root, name, *number).map_err(failed)?;
        }
        content.meta.attributes.iter().try_for_each(|(name, text)| write_attribute(&file, name, text))?;
        Ok(Box::new(WindowWriter::new(Self(file), path, content, places)))
    }
}

/// Finds the layout that can hold the content.
fn layout(content: &Content) -> Result<Layout> {
    let refused = |problem: String| {
        Err(Error::Invalid(format!(
            "{problem}, which PDEBench's layouts do not support; write hdf5, netcdf or zarr, or choose other variables (--variables)"
        )))
    };
    if content.meta.times.is_empty() {
        return refused("samples have no times".to_owned());
    }
    if content.dims.is_empty() || content.dims.len() > DIMS.len() {
        return refused(format!("there are {} spatial dims", content.dims.len()));
    }
    let fixed =
        |variable: &&DataVariable| variable.is_static || variable.uniform || variable.levels.is_some();
    if let Some(variable) = content.variables.iter().find(fixed) {
        return refused(format!("`{}` is static, has no spatial dims or has levels", variable.name));
    }
    let all = |fits: &dyn Fn(&DataVariable) -> bool| content.variables.iter().all(fits);
    let named = |names: &[&str], own: &DataVariable| names.contains(&own.name.as_str());
    match &content.variables[..] {
        // The reader knows the layout by `velocity`.
        variables
            if content.dims.len() == 2
                && all(&|own| named(&FLOW, own))
                && variables.iter().any(|own| own.name == FLOW[0]) =>
        {
            Ok(Layout::Flow)
        }
        _ if all(&|own| named(&FIELDS, own) && !own.has_channel_axis()) => Ok(Layout::Fields),
        [own] if !own.has_channel_axis() => Ok(Layout::Fields),
        [_] => Ok(Layout::Groups),
        variables => {
            let names: Vec<&str> = variables.iter().map(|own| own.name.as_str()).collect();
            refused(format!(
                "the variables {} are together, expected a single variable, scalars of the names {}, or {} on a grid of two dims",
                names.join(", "),
                FIELDS.join(", "),
                FLOW.join(" and ")
            ))
        }
    }
}

/// Variables of incompressible flow.
const FLOW: [&str; 2] = ["velocity", "particles"];

/// Creates the dataset of a scalar, called `tensor` unless it has one of PDEBench's names.
fn scalar(root: &Group, content: &Content, variable: &DataVariable) -> hdf5_metno::Result<Place> {
    let name = FIELDS.into_iter().find(|name| *name == variable.name).unwrap_or("tensor");
    if name != variable.name {
        tracing::warn!("storing `{}` as `{name}`, the name that PDEBench's layout requires", variable.name);
    }
    dataset(root, name, &StoredAxes::new(content, variable).shape()).map(Place::Scalar)
}

/// Creates a group for each sample.
fn groups(root: &Group, content: &Content, variable: &DataVariable) -> hdf5_metno::Result<Place> {
    if variable.name != DATA {
        tracing::warn!("storing `{}` as `{DATA}`, the name that PDEBench's layout requires", variable.name);
    }
    let shape = channels_last(content, variable);
    let one = |sample: usize| dataset(&root.create_group(&format!("{sample:04}"))?, DATA, &shape[1..]);
    (0..content.meta.samples).map(one).collect::<hdf5_metno::Result<_>>().map(Place::Groups)
}

/// Name of the dataset in the group of a sample.
const DATA: &str = "data";

/// Shape of a variable, `[sample, time, x, …, channel]`, with one channel for a scalar.
fn channels_last(content: &Content, variable: &DataVariable) -> Vec<usize> {
    let mut shape = StoredAxes::new(content, variable).shape();
    match variable.has_channel_axis() {
        true => shape[2..].rotate_left(1),
        false => shape.push(1),
    }
    shape
}

fn dataset(group: &Group, name: &str, shape: &[usize]) -> hdf5_metno::Result<Dataset> {
    group.new_dataset_builder().obj_track_times(false).empty::<f32>().shape(shape).create(name)
}

/// Writes coordinates and times where the layout has them.
fn coordinates(root: &Group, content: &Content, layout: &Layout) -> hdf5_metno::Result<()> {
    let line = |group: &Group, name: &str, values: &[f64], attributes: &Texts<'_>| {
        let dataset = group.new_dataset_builder().obj_track_times(false).with_data(values).create(name)?;
        write_texts(&dataset, attributes)
    };
    let points = |group: &Group, name: &dyn Fn(&str) -> String| {
        let mut dims = DIMS.into_iter().zip(&content.dims);
        dims.try_for_each(|(axis, dim)| line(group, &name(axis), &dim.coordinates, &dim.attributes()))
    };
    let (times, of_times) = (&content.meta.times, of_times(content.time_unit.as_ref(), true));
    match layout {
        Layout::Fields => {
            points(root, &|axis| format!("{axis}-coordinate"))?;
            // PDEBench stores one more time than frames.
            let step = times.windows(2).last().map_or(1.0, |pair| pair[1] - pair[0]);
            let after = times.last().map(|last| last + step);
            line(root, "t-coordinate", &times.iter().copied().chain(after).collect::<Vec<f64>>(), &of_times)
        }
        Layout::Flow => {
            // They are not part of PDEBench's layout; its readers ignore them.
            points(root, &|axis| format!("{axis}-coordinate"))?;
            let all = times.repeat(content.meta.samples);
            let view = ArrayView::from_shape((content.meta.samples, times.len()), &all)?;
            let dataset = root.new_dataset_builder().obj_track_times(false).with_data(view).create("t")?;
            write_texts(&dataset, &of_times)
        }
        Layout::Groups => (0..content.meta.samples).try_for_each(|sample| {
            let grid = root.create_group(&format!("{sample:04}/grid"))?;
            points(&grid, &str::to_owned)?;
            line(&grid, "t", times, &of_times)
        }),
    }
}

impl Place {
    /// Stores the unit and the names of channels as attributes, as in plain HDF5.
    fn describe(&self, variable: &DataVariable) -> hdf5_metno::Result<()> {
        let dataset = match self {
            Self::Scalar(dataset) | Self::Channels(dataset) => Some(dataset),
            Self::Groups(samples) => samples.first(),
        };
        let Some(dataset) = dataset else { return Ok(()) };
        if let Some(unit) = &variable.unit {
            text(dataset, UNITS, unit)?;
        }
        match variable.has_channel_axis() {
            true => text(dataset, COMPONENTS, &variable.channels.join(" ")),
            false => Ok(()),
        }
    }

    /// Writes a window of one sample: `[sample, time, channel, x, …]`, without channel for scalars.
    fn write(&self, window: &[Range<usize>], values: &[f32]) -> hdf5_metno::Result<()> {
        let (dataset, skipped) = match self {
            Self::Scalar(dataset) | Self::Channels(dataset) => (dataset, 0),
            Self::Groups(samples) => (&samples[window[0].start], 1),
        };
        let mut own = window[skipped..].to_vec();
        let mut order: Vec<usize> = (0..own.len()).collect();
        let mut given: Vec<usize> = own.iter().map(Range::len).collect();
        match self {
            Self::Scalar(_) => (),
            _ if dataset.ndim() > own.len() => {
                order.push(own.len());
                own.push(0..1);
                given.push(1);
            }
            _ => {
                order[2 - skipped..].rotate_left(1);
                own[2 - skipped..].rotate_left(1);
            }
        }
        let view = ArrayView::from_shape(given, values)?.permuted_axes(IxDyn(&order));
        dataset.write_slice(&view.as_standard_layout(), hyperslab(&own))
    }
}

impl WindowStore for PdeBenchFile {
    type Handle = Place;

    fn write(&self, place: &Place, variable: &str, window: &[Range<usize>], values: &[f32]) -> Result<()> {
        let failed = |error| Error::hdf5(self.0.target(), format!("write `{variable}`"), error);
        place.write(window, values).map_err(failed)
    }

    fn finish(self, places: Vec<Place>) -> Result<()> {
        // Datasets are closed before their file.
        drop(places);
        self.0.finish()
    }
}
