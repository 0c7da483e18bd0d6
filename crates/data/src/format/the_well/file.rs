//! Files of The Well's HDF5 schema.

use std::ops::Range;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::field::WellField;
use super::meta::{WellDim, WellMeta};
use crate::boxes::check_range;
use crate::dataset::cat;
use crate::{Error, Result, Statistics};

/// Trajectories of a simulation in one HDF5 file of The Well's schema.
///
/// The schema is that of [The Well](https://github.com/PolymathicAI/the_well) (Ohana et al. 2024); units are those of the
/// simulation. With d spatial dims, 1 to 3:
///
/// | name | shape | is |
/// |---|---|---|
/// | `dimensions/time`, `dimensions/x`, … | `[time]`, `[x]`, … | times and coordinates, ascending; the attribute `spatial_dims` names the spatial ones |
/// | `boundary_conditions/…` | | groups whose attributes `bc_type` and `associated_dims` say what happens at the ends of which dims |
/// | `t0_fields/…` | `[trajectory, time, x, …]` | scalars, float32; the attribute `field_names` lists them |
/// | `t1_fields/…` | `[trajectory, time, x, …, d]` | vectors |
/// | `t2_fields/…` | `[trajectory, time, x, …, d, d]` | tensors |
/// | `scalars/…` | `[trajectory, time]` | numbers of a trajectory, such as a viscosity |
///
/// A field's attribute `units`, which The Well's own files lack, is the unit of its values.
///
/// A field that does not vary between trajectories, in time or along a dim (attributes `sample_varying`, `time_varying`,
/// `dim_varying`) is stored without it, and repeated when read.
///
/// Storage is limited as that of [`DarcyFile`](crate::DarcyFile). [`WellFile::open`] checks the whole layout; values are checked when they are read. Coordinates that vary between
/// trajectories or in time are refused. The file stays open and is only read, so any number of ranks may share it. Nothing
/// here is collective: each rank reads what it needs.
///
/// ```
/// use isobar_data::WellFile;
/// # use isobar_data::{WellDim, WellMeta, WellWriter};
/// # use tch::{Device, Kind, Tensor};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("flow.h5");
/// # let dim = |name: &str| WellDim {
/// #     name: name.to_owned(),
/// #     coordinates: (0..8).map(|i| f64::from(i) / 8.0).collect(),
/// #     periodic: true,
/// # };
/// # let meta = WellMeta {
/// #     name: "flow".to_owned(),
/// #     trajectories: 1,
/// #     times: vec![0.0, 1.0, 2.0],
/// #     dims: vec![dim("x"), dim("y")],
/// #     fields: vec![("vorticity".to_owned(), 0), ("velocity".to_owned(), 1)],
/// #     ..WellMeta::default()
/// # };
/// # let mut writer = WellWriter::create(&path, &meta)?;
/// # writer.write("vorticity", 0, 0, &Tensor::zeros([3, 1, 8, 8], (Kind::Float, Device::Cpu)))?;
/// # writer.write("velocity", 0, 0, &Tensor::ones([3, 2, 8, 8], (Kind::Float, Device::Cpu)))?;
/// # writer.finish()?;
///
/// let file = WellFile::open(&path)?;
/// // Two frames of the first trajectory, half of the grid: vorticity, then the velocity's two components.
/// let frames = file.read(&["vorticity", "velocity"], 0, 0..2, &[0..4, 0..8])?;
/// assert_eq!(frames.size(), [2, 3, 4, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct WellFile {
    pub(super) path: PathBuf,
    pub(super) name: String,
    pub(super) grid_type: String,
    pub(super) trajectories: usize,
    pub(super) times: Vec<f64>,
    pub(super) spatial_dims: Vec<String>,
    pub(super) coordinates: Vec<Vec<f64>>,
    pub(super) grid: Vec<usize>,
    pub(super) periodic: Vec<bool>,
    pub(super) coordinate_units: Vec<(String, String)>,
    pub(super) calendar: Option<String>,
    pub(super) parameters: Vec<(String, f64)>,
    pub(super) fields: Vec<WellField>,
    pub(super) scalars: Vec<WellField>,
}

impl WellFile {
    /// The path as given to [`WellFile::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name of the data set.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kind of grid, such as `cartesian`.
    pub fn grid_type(&self) -> &str {
        &self.grid_type
    }

    /// Number of trajectories, at least 1.
    pub fn trajectories(&self) -> usize {
        self.trajectories
    }

    /// Number of frames of each trajectory, at least 1.
    pub fn frames(&self) -> usize {
        self.times.len()
    }

    /// Points along each spatial dim.
    pub fn grid(&self) -> &[usize] {
        &self.grid
    }

    /// Names of the spatial dims, in the order in which the fields have them.
    pub fn spatial_dims(&self) -> &[String] {
        &self.spatial_dims
    }

    /// Times of the frames.
    pub fn times(&self) -> &[f64] {
        &self.times
    }

    /// Coordinates of the points along a spatial dim, counted from 0.
    ///
    /// # Panics
    /// If there is no such dim.
    pub fn coordinates(&self, dim: usize) -> &[f64] {
        &self.coordinates[dim]
    }

    /// Unit of the times (`time`) or of a spatial dim, if the file stores one.
    pub fn coordinate_unit(&self, name: &str) -> Option<&str> {
        let found = self.coordinate_units.iter().find(|(own, _)| own == name);
        found.map(|(_, unit)| unit.as_str())
    }

    /// CF's name of the calendar of the times, if the file stores one.
    pub fn calendar(&self) -> Option<&str> {
        self.calendar.as_deref()
    }

    /// Returns whether a spatial dim, counted from 0, is periodic by `boundary_conditions`.
    ///
    /// # Panics
    /// If there is no such dim.
    pub fn is_periodic(&self, dim: usize) -> bool {
        self.periodic[dim]
    }

    /// The simulation's parameters that are one number, such as a viscosity; others are left out.
    pub fn parameters(&self) -> &[(String, f64)] {
        &self.parameters
    }

    /// Returns the file's metadata, to write a file like it. All of its fields vary.
    pub fn meta(&self) -> WellMeta {
        let names = self.spatial_dims.iter().zip(&self.coordinates).zip(&self.periodic);
        WellMeta {
            name: self.name.clone(),
            grid_type: self.grid_type.clone(),
            trajectories: self.trajectories,
            times: self.times.clone(),
            dims: names
                .map(|((name, coordinates), &periodic)| WellDim {
                    name: name.clone(),
                    coordinates: coordinates.clone(),
                    periodic,
                })
                .collect(),
            fields: self.fields.iter().map(|field| (field.name.clone(), field.order)).collect(),
            parameters: self.parameters.clone(),
            units: self
                .fields
                .iter()
                .filter_map(|field| Some((field.name.clone(), field.unit.clone()?)))
                .collect(),
            coordinate_units: self.coordinate_units.clone(),
            calendar: self.calendar.clone(),
            constants: Vec::new(),
        }
    }

    /// The fields: scalars first, then vectors, then tensors.
    pub fn fields(&self) -> &[WellField] {
        &self.fields
    }

    /// The scalars of the group `scalars`, which have no spatial dims.
    pub fn scalars(&self) -> &[WellField] {
        &self.scalars
    }

    /// A field or scalar by its name.
    ///
    /// # Errors
    /// If there is none of that name; the error lists the fields.
    pub fn field(&self, name: &str) -> Result<&WellField> {
        self.fields.iter().chain(&self.scalars).find(|field| field.name == name).ok_or_else(|| {
            Error::MissingField {
                path: self.path.clone(),
                field: name.to_owned(),
                found: self.fields.iter().map(|field| field.name.clone()).collect(),
            }
        })
    }

    /// Reads consecutive frames of one trajectory, a range of points of each spatial dim, as float32 on the CPU:
    /// `[frame, channel, x, …]`. The channels are the fields' components, one field after the other in the order asked
    /// for (a tensor's row by row). No other part of the file is read, but for the rest of compressed chunks that the
    /// window touches. Any range may be empty, as a rank's part may be.
    ///
    /// # Errors
    /// If no field is asked for or one is not there, the window has not one range a spatial dim, an index is out of
    /// range, the file can't be read, or a value in the window is not finite; the error names the dataset and the index
    /// of the first such value.
    pub fn read(
        &self,
        fields: &[&str],
        trajectory: usize,
        frames: Range<usize>,
        window: &[Range<usize>],
    ) -> Result<Tensor> {
        let fields = self.chosen(fields)?;
        if trajectory >= self.trajectories {
            return Err(Error::OutOfRange {
                what: "trajectory".to_owned(),
                asked: trajectory.to_string(),
                available: self.trajectories,
            });
        }
        check_range("frame range", &frames, self.frames())?;
        if window.len() != self.grid.len() {
            return Err(Error::Invalid(format!(
                "a window of {} ranges was asked for where there are {} spatial dims: {}",
                window.len(),
                self.grid.len(),
                self.spatial_dims.join(", ")
            )));
        }
        for ((name, range), &points) in self.spatial_dims.iter().zip(window).zip(&self.grid) {
            check_range(format!("{name} range"), range, points)?;
        }

        let extents: Vec<i64> =
            std::iter::once(&frames).chain(window).map(|range| range.len() as i64).collect();
        if extents.contains(&0) {
            let channels: usize = fields.iter().map(|field| field.components).sum();
            let shape = [&extents[..1], &[channels as i64], &extents[1..]].concat();
            return Ok(Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?);
        }
        let axes = [&[trajectory..trajectory + 1, frames], window].concat();
        let parts = fields
            .iter()
            .map(|field| field.read(&self.path, &axes, &extents))
            .collect::<Result<Vec<Tensor>>>()?;
        cat(parts, 1)
    }

    /// Statistics of each channel, as [`WellFile::read`] orders them, over all frames and points of a range of
    /// trajectories, in float64, reading a few frames at a time. Over all fields and trajectories it is also a check of
    /// the whole file.
    ///
    /// # Errors
    /// If no field is asked for or one is not there, the range is empty or out of range, the file can't be read, or a
    /// value is not finite.
    pub fn statistics(&self, fields: &[&str], trajectories: Range<usize>) -> Result<Vec<Statistics>> {
        let fields = self.chosen(fields)?;
        check_range("trajectory range", &trajectories, self.trajectories)?;
        let whole: Vec<Range<usize>> = [trajectories, 0..self.frames()]
            .into_iter()
            .chain(self.grid.iter().map(|&points| 0..points))
            .collect();
        let mut statistics = Vec::new();
        for field in fields {
            statistics.extend(field.statistics(&self.path, &whole)?);
        }
        Ok(statistics)
    }

    /// Computes statistics of each channel's changes from one frame to the next, like
    /// [`WellFile::statistics`]; zeros for a field that does not vary in time.
    ///
    /// # Errors
    /// Those of [`WellFile::statistics`]; a file with a single frame.
    pub fn change_statistics(&self, fields: &[&str], trajectories: Range<usize>) -> Result<Vec<Statistics>> {
        let fields = self.chosen(fields)?;
        check_range("trajectory range", &trajectories, self.trajectories)?;
        let points = self.grid.iter().map(|&points| 0..points);
        let whole: Vec<Range<usize>> = [trajectories, 0..self.frames()].into_iter().chain(points).collect();
        let mut statistics = Vec::new();
        for field in fields {
            statistics.extend(field.change_statistics(&self.path, &whole)?);
        }
        Ok(statistics)
    }

    /// Returns the name and unit of each channel, in the order of [`WellFile::read`]. A scalar has its own
    /// name; each component of a vector or tensor is named as in The Well: `velocity_x`, `stress_xy`.
    ///
    /// # Errors
    /// If no field is requested, or one does not exist.
    pub fn channels(&self, fields: &[&str]) -> Result<Vec<(String, Option<String>)>> {
        let mut channels = Vec::new();
        for field in self.chosen(fields)? {
            let names = field.component_names(&self.spatial_dims);
            channels.extend(names.into_iter().map(|name| (name, field.unit.clone())));
        }
        Ok(channels)
    }

    pub(super) fn chosen(&self, names: &[&str]) -> Result<Vec<&WellField>> {
        if names.is_empty() {
            return Err(Error::Invalid("at least one field must be asked for".to_owned()));
        }
        names.iter().map(|name| self.field(name)).collect()
    }
}
