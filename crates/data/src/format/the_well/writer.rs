//! Writes The Well's schema.

use std::ops::Range;
use std::path::Path;

use hdf5_metno::{Dataset, File, Group, Location};
use isobar_torch::memory;
use ndarray::ArrayView;
use tch::{Device, Kind, Tensor};

use super::meta::WellMeta;
use super::names::{
    ASSOCIATED_DIMS, ASSOCIATED_FIELDS, BC_TYPE, BOUNDARY_CONDITIONS, CALENDAR, DATASET_NAME, DIM_VARYING,
    DIMENSIONS, FIELD_NAMES, FIELDS, GRID_TYPE, MASK, PARAMETERS, PERIODIC, SAMPLE_VARYING, SCALARS,
    SPATIAL_DIMS, SPATIAL_DIMS_COUNT, TIME, TIME_VARYING, TRAJECTORIES, UNITS, VALUES,
};
use crate::boxes::check_range;
use crate::finite::check_finite;
use crate::hdf5::atomic_file::AtomicFile;
use crate::hdf5::layout::hyperslab;
use crate::hdf5::{number, text, texts, write_attribute};
use crate::{Error, Result};

/// Writes a file that [`WellFile`](crate::WellFile) reads, some frames of a field at a time, in any order.
///
/// The file is that of The Well's format: dims that are periodic have a boundary condition that says so, others have none
/// (The Well takes them for open). Fields are contiguous float32, so that a window is read without what is around it. The
/// file is written aside, in the same folder, and takes its name in [`WellWriter::finish`], replacing what had it: nobody
/// ever sees half a file, and one that is not finished leaves nothing behind. The same values give the same bytes.
///
/// ```
/// use isobar_data::{WellDim, WellFile, WellMeta, WellWriter};
/// use tch::{Device, Kind, Tensor};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("advection.h5");
/// let x = WellDim { name: "x".to_owned(), coordinates: vec![0.0, 0.25, 0.5, 0.75], periodic: true };
/// let meta = WellMeta {
///     name: "advection".to_owned(),
///     trajectories: 2,
///     times: vec![0.0, 0.1, 0.2],
///     dims: vec![x],
///     fields: vec![("u".to_owned(), 0)],
///     parameters: vec![("speed".to_owned(), 1.0)],
///     ..WellMeta::default()
/// };
/// let mut writer = WellWriter::create(&path, &meta)?;
/// for trajectory in 0..2 {
///     // [frame, channel, x]
///     writer.write("u", trajectory, 0, &Tensor::rand([3, 1, 4], (Kind::Float, Device::Cpu)))?;
/// }
/// writer.finish()?;
/// let file = WellFile::open(&path)?;
/// assert_eq!((file.frames(), file.is_periodic(0)), (3, true));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct WellWriter {
    aside: AtomicFile,
    trajectories: usize,
    frames: usize,
    grid: Vec<usize>,
    fields: Vec<Field>,
}

#[derive(Debug)]
struct Field {
    name: String,
    order: usize,
    /// True if one frame is that of all trajectories and times.
    is_constant: bool,
    dataset: Dataset,
    /// Points of each component that were written, by trajectory and frame.
    written: Vec<usize>,
}

impl WellWriter {
    /// Makes the file and all in it but the fields' values.
    ///
    /// # Errors
    /// If `meta` makes no file that could be read (nothing of something, times or coordinates that do not ascend, names
    /// that are taken or can't be one), or the file can't be made: the folder is missing or read-only.
    pub fn create(path: impl AsRef<Path>, meta: &WellMeta) -> Result<Self> {
        meta.check()?;
        let aside = AtomicFile::create(path.as_ref())?;
        let fields = lay_out(aside.file(), meta)
            .map_err(|error| Error::hdf5(aside.target(), "write its layout", error))?;
        let grid = meta.dims.iter().map(|dim| dim.coordinates.len()).collect();
        Ok(Self { aside, trajectories: meta.trajectories, frames: meta.times.len(), grid, fields })
    }

    /// Writes an attribute of the file, for example the origin of its values. Readers of The Well's schema
    /// ignore it.
    ///
    /// # Errors
    /// If an attribute of that name exists, or the text has a zero byte.
    pub fn attribute(&self, name: &str, value: &str) -> Result<()> {
        write_attribute(&self.aside, name, value)
    }

    /// Writes consecutive frames of one field and trajectory, from `first` on. `values` is `[frame, channel, x, …]` with
    /// the field's components as channels (a tensor's row by row), as [`WellFile::read`](crate::WellFile::read) gives
    /// them, of any real dtype and on any device; it is stored as float32. What was written before is replaced.
    ///
    /// # Errors
    /// If there is no such field or trajectory, the shape does not fit, frames reach beyond the last, a value is not
    /// finite in float32, or the disk is full.
    pub fn write(&mut self, field: &str, trajectory: usize, first: usize, values: &Tensor) -> Result<()> {
        let all: Vec<Range<usize>> = self.grid.iter().map(|&points| 0..points).collect();
        self.write_window(field, trajectory, first, &all, values)
    }

    /// Writes a window of the points of consecutive frames, a range for each spatial dim, like [`WellWriter::write`]. The windows of
    /// a frame cover it together, each point once.
    ///
    /// # Errors
    /// As [`WellWriter::write`], and for a range that reaches beyond the last point.
    pub fn write_window(
        &mut self,
        field: &str,
        trajectory: usize,
        first: usize,
        points: &[Range<usize>],
        values: &Tensor,
    ) -> Result<()> {
        let path = self.aside.target();
        let Some(at) = self.fields.iter().position(|known| known.name == field) else {
            let found = self.fields.iter().map(|field| field.name.clone()).collect();
            return Err(Error::MissingField { path: path.to_owned(), field: field.to_owned(), found });
        };
        let field = &mut self.fields[at];
        let (trajectories, all) = if field.is_constant { (1, 1) } else { (self.trajectories, self.frames) };
        if trajectory >= trajectories {
            return Err(Error::OutOfRange {
                what: "trajectory".to_owned(),
                asked: trajectory.to_string(),
                available: trajectories,
            });
        }
        let dims = self.grid.len();
        let components = dims.pow(field.order as u32);
        let shape: Vec<usize> = values.size().iter().map(|&extent| extent as usize).collect();
        let extents: Vec<usize> = points.iter().map(Range::len).collect();
        let fits = points.len() == dims && shape.len() == dims + 2;
        if !fits || shape[1] != components || shape[2..] != extents {
            return Err(Error::Invalid(format!(
                "values of shape {shape:?} were given for `{}`: expected [frame, {components}, {}]",
                field.name,
                extents.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
            )));
        }
        let frames = first..first.saturating_add(shape[0]);
        check_range("frame range", &frames, all)?;
        for (range, &points) in points.iter().zip(&self.grid) {
            check_range("range of points", range, points)?;
        }
        if shape.contains(&0) {
            return Ok(());
        }

        // Components last, as they are stored.
        let order: Vec<i64> = std::iter::once(0).chain(2..dims as i64 + 2).chain([1]).collect();
        let stored = values.f_detach()?.f_permute(order)?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
        let stored: Vec<f32> = memory::to_vec(&stored)?;
        let leading = [trajectory..trajectory + 1, frames.clone()];
        let window: Vec<Range<usize>> = leading
            .into_iter()
            .filter(|_| !field.is_constant)
            .chain(points.iter().cloned())
            .chain((0..field.order).map(|_| 0..dims))
            .collect();
        let place = format!("{}/{}", FIELDS[field.order], field.name);
        check_finite(path, &place, &window, &stored)?;
        let failed = |error| Error::hdf5(path, format!("write dataset `{place}`"), error);
        let count: usize = extents.iter().product();
        let extents: Vec<usize> = window.iter().map(Range::len).collect();
        let view = ArrayView::from_shape(extents, &stored).map_err(|error| failed(error.into()))?;
        field.dataset.write_slice(view, hyperslab(&window)).map_err(failed)?;
        let written = trajectory * all;
        let written = &mut field.written[written + frames.start..written + frames.end];
        written.iter_mut().for_each(|written| *written = written.saturating_add(count));
        Ok(())
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// If frames are still missing, or the disk is full.
    pub fn finish(self) -> Result<()> {
        let Self { aside, frames, fields, grid, .. } = self;
        let points: usize = grid.iter().product();
        for field in &fields {
            if let Some(at) = field.written.iter().position(|&written| written < points) {
                return Err(Error::Invalid(format!(
                    "frame {} of trajectory {} of `{}` was not written; add it first",
                    at % frames,
                    at / frames,
                    field.name
                )));
            }
        }
        drop(fields);
        aside.finish()
    }
}

fn lay_out(file: &File, meta: &WellMeta) -> hdf5_metno::Result<Vec<Field>> {
    text(file, DATASET_NAME, &meta.name)?;
    text(file, GRID_TYPE, &meta.grid_type)?;
    number(file, SPATIAL_DIMS_COUNT, meta.dims.len() as i64)?;
    number(file, TRAJECTORIES, meta.trajectories as i64)?;
    texts(file, PARAMETERS, meta.parameters.iter().map(|(name, _)| &**name))?;
    for (name, value) in &meta.parameters {
        number(file, name, *value)?;
    }

    let dimensions = file.create_group(DIMENSIONS)?;
    texts(&dimensions, SPATIAL_DIMS, meta.dims.iter().map(|dim| &*dim.name))?;
    let unit = |name: &str| meta.coordinate_unit(name);
    let times = match meta.has_double_times() {
        true => plain(&dimensions).with_data(&meta.times).create(TIME)?,
        false => plain(&dimensions).with_data(&single(&meta.times)).create(TIME)?,
    };
    described(&times, unit(TIME), true)?;
    if let Some(calendar) = &meta.calendar {
        text(&times, CALENDAR, calendar)?;
    }
    let conditions = file.create_group(BOUNDARY_CONDITIONS)?;
    for dim in &meta.dims {
        let points = plain(&dimensions).with_data(&single(&dim.coordinates)).create(dim.name.as_str())?;
        described(&points, unit(&dim.name), false)?;
        if dim.periodic {
            periodic(&conditions, &dim.name, dim.coordinates.len())?;
        }
    }

    let scalars = file.create_group(SCALARS)?;
    texts(&scalars, FIELD_NAMES, meta.parameters.iter().map(|(name, _)| &**name))?;
    for (name, value) in &meta.parameters {
        let scalar = plain(&scalars).empty::<f32>().shape(()).create(name.as_str())?;
        scalar.write_scalar(&(*value as f32))?;
        varying(&scalar, false, false)?;
    }

    let mut fields = Vec::new();
    for (order, group) in FIELDS.into_iter().enumerate() {
        let group = file.create_group(group)?;
        let names = || meta.fields.iter().filter(|(_, of)| *of == order).map(|(name, _)| &**name);
        texts(&group, FIELD_NAMES, names())?;
        for name in names() {
            let dims = meta.dims.len();
            let is_constant = meta.constants.iter().any(|constant| constant == name);
            let leading = if is_constant { vec![] } else { vec![meta.trajectories, meta.times.len()] };
            let written = vec![0; leading.iter().product()];
            let shape: Vec<usize> = leading
                .into_iter()
                .chain(meta.dims.iter().map(|dim| dim.coordinates.len()))
                .chain((0..order).map(|_| dims))
                .collect();
            let dataset = plain(&group).empty::<f32>().shape(shape).create(name)?;
            varying(&dataset, !is_constant, !is_constant)?;
            dataset.new_attr::<bool>().shape(dims).create(DIM_VARYING)?.write_raw(&vec![true; dims])?;
            if let Some((_, unit)) = meta.units.iter().find(|(field, _)| field == name) {
                text(&dataset, UNITS, unit)?;
            }
            fields.push(Field { name: name.to_owned(), order, is_constant, dataset, written });
        }
    }
    Ok(fields)
}

/// No times of creation: the same data is the same file.
fn plain(group: &Group) -> hdf5_metno::DatasetBuilder {
    group.new_dataset_builder().obj_track_times(false)
}

fn single(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

/// Writes the attributes of coordinates, or of times.
fn described(dataset: &Dataset, unit: Option<&str>, of_time: bool) -> hdf5_metno::Result<()> {
    varying(dataset, false, of_time)?;
    unit.map_or(Ok(()), |unit| text(dataset, UNITS, unit))
}

/// A condition that both ends of a dim are the same place. Its values mean nothing, but belong to the format.
fn periodic(conditions: &Group, dim: &str, points: usize) -> hdf5_metno::Result<()> {
    let condition = conditions.create_group(&format!("{dim}_{PERIODIC}"))?;
    text(&condition, BC_TYPE, PERIODIC)?;
    texts(&condition, ASSOCIATED_DIMS, [dim].into_iter())?;
    texts(&condition, ASSOCIATED_FIELDS, std::iter::empty())?;
    varying(&condition, false, false)?;
    let ends: Vec<bool> = (0..points).map(|point| point == 0 || point + 1 == points).collect();
    plain(&condition).with_data(&ends).create(MASK)?;
    plain(&condition).with_data(&[0.0_f32; 2]).create(VALUES)?;
    Ok(())
}

fn varying(location: &Location, between_samples: bool, in_time: bool) -> hdf5_metno::Result<()> {
    number(location, SAMPLE_VARYING, between_samples)?;
    number(location, TIME_VARYING, in_time)
}
