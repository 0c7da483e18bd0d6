//! Fields that are computed from times and coordinates.

use std::f64::consts::TAU;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::sun::Sun;
use crate::calendar::TimeAxis;
use crate::dataset::Dataset;
use crate::grid::Dim;
use crate::{Error, Result};

/// A field that can be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    DayOfYear,
    TimeOfDay,
    ToaRadiation,
    Latitude,
    Longitude,
}

/// Names, whether a field depends on time, and its channels.
const FIELDS: [(&str, Field, bool, &[&str]); 5] = [
    ("day_of_year", Field::DayOfYear, true, &["sin_day_of_year", "cos_day_of_year"]),
    ("time_of_day", Field::TimeOfDay, true, &["sin_time_of_day", "cos_time_of_day"]),
    ("toa_radiation", Field::ToaRadiation, true, &["toa_radiation"]),
    ("latitude", Field::Latitude, false, &["sin_latitude"]),
    ("longitude", Field::Longitude, false, &["sin_longitude", "cos_longitude"]),
];

/// Fields computed from the times and coordinates of a data set, on a window of its points.
///
/// | name | channels |
/// |---|---|
/// | `day_of_year` | sine and cosine of the fraction of the year |
/// | `time_of_day` | sine and cosine of the fraction of the day: local solar time if the data have longitudes, else UTC |
/// | `toa_radiation` | solar radiation at the top of the atmosphere on a horizontal plane at that instant, as a fraction of the solar constant, 1361 W/m² |
/// | `latitude` | sine |
/// | `longitude` | sine and cosine |
///
/// Radiation is `S (d₀/d)² max(0, sin φ sin δ + cos φ cos δ cos h)`, with the declination `δ`, the distance `d` and the hour
/// angle `h` of Spencer (1971). Nothing communicates: each rank computes its own window.
#[derive(Clone, Debug)]
pub struct Computed {
    fields: Vec<Field>,
    axis: Option<TimeAxis>,
    /// Extents of the window.
    shape: Vec<i64>,
    latitude: Option<Line>,
    longitude: Option<Line>,
}

/// Angles of the points along a dim of the window.
#[derive(Clone, Debug)]
struct Line {
    dim: usize,
    radians: Vec<f64>,
}

impl Computed {
    /// Returns whether a name is that of a computed field.
    pub fn is_name(name: &str) -> bool {
        FIELDS.iter().any(|(known, ..)| *known == name)
    }

    /// Returns the name of the computed field that is nearest in spelling, if it is near enough to be what was meant.
    ///
    /// ```
    /// assert_eq!(isobar_data::Computed::nearest("toa_radiaton"), Some("toa_radiation"));
    /// ```
    pub fn nearest(name: &str) -> Option<&'static str> {
        isobar_registry::nearest(name, FIELDS.iter().map(|(known, ..)| *known))
    }

    /// Returns whether the computed field of a name depends on time.
    pub fn needs_time(name: &str) -> bool {
        FIELDS.iter().any(|(known, _, time, _)| *known == name && *time)
    }

    /// Names of the channels of computed fields, one field after the other.
    pub fn channels(names: &[String]) -> Vec<String> {
        let channels = names.iter().filter_map(|name| FIELDS.iter().find(|(known, ..)| known == name));
        channels.flat_map(|(.., channels)| channels.iter().map(|channel| (*channel).to_owned())).collect()
    }

    /// Prepares fields for a window of a data set's points, a range for each spatial dim. Reads no values.
    ///
    /// # Errors
    /// A name that no field has, times without a calendar, or a grid without the latitudes or longitudes that a field needs.
    pub fn new(names: &[String], data: &dyn Dataset, window: &[Range<usize>]) -> Result<Self> {
        let path = data.path().display();
        let find = |name: &String| {
            FIELDS.iter().find(|(known, ..)| known == name).map(|(_, field, ..)| *field).ok_or_else(|| {
                let known: Vec<&str> = FIELDS.iter().map(|(name, ..)| *name).collect();
                Error::Config(format!("{name:?} is no computed field, expected one of {known:?}"))
            })
        };
        let fields = names.iter().map(find).collect::<Result<Vec<Field>>>()?;
        let dims = data.dims();
        if window.len() != dims.len() {
            return Err(Error::Invalid(format!(
                "a window of {} ranges for {} spatial dims",
                window.len(),
                dims.len()
            )));
        }
        let latitude = line(dims, window, Dim::is_latitude)?;
        let longitude = line(dims, window, Dim::is_longitude)?;
        for (name, field) in names.iter().zip(&fields) {
            let lacks = |there: &Option<Line>, of: &[Field]| of.contains(field) && there.is_none();
            for (kind, unit, missing) in [
                ("latitudes", "degrees_north", lacks(&latitude, &[Field::Latitude, Field::ToaRadiation])),
                ("longitudes", "degrees_east", lacks(&longitude, &[Field::Longitude, Field::ToaRadiation])),
            ] {
                if missing {
                    let names: Vec<&str> = dims.iter().map(|dim| dim.name.as_str()).collect();
                    return Err(Error::Config(format!(
                        "{name} needs {kind}, but the dims of {path} are {names:?}: expected a dim with the unit {unit}, or \
                         named {}",
                        if kind == "latitudes" { "lat or latitude" } else { "lon or longitude" }
                    )));
                }
            }
        }
        let timed = names.iter().find(|name| Self::needs_time(name));
        let axis = match (timed, data.time_unit().filter(|_| data.times().is_some())) {
            (None, _) => None,
            (Some(name), None) => {
                return Err(Error::Config(format!(
                    "{name} needs dates, but the times of {path} have no unit such as \"hours since 1900-01-01\" (trajectories \
                     that are cut have none: split by data.train_times instead)"
                )));
            }
            (Some(_), Some(unit)) => Some(TimeAxis::new(unit)?),
        };
        let shape = window.iter().map(|range| range.len() as i64).collect();
        Ok(Self { fields, axis, shape, latitude, longitude })
    }

    /// Computes the fields at some times of the data set: `[time, channel, x, …]`, float64 on the CPU.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn at(&self, times: &[f64]) -> Result<Tensor> {
        let channels = FIELDS.iter().filter(|(_, field, ..)| self.fields.contains(field));
        let count: usize = channels.map(|(.., channels)| channels.len()).sum();
        if times.is_empty() || count == 0 {
            let shape = [&[times.len() as i64, count as i64], &self.shape[..]].concat();
            return Ok(Tensor::f_zeros(shape, (Kind::Double, Device::Cpu))?);
        }
        let each = times.iter().map(|time| Ok(Tensor::f_stack(&self.channels_at(*time)?, 0)?));
        Ok(Tensor::f_stack(&each.collect::<Result<Vec<Tensor>>>()?, 0)?)
    }

    fn channels_at(&self, time: f64) -> Result<Vec<Tensor>> {
        let date = self.axis.map(|axis| axis.date(time));
        let mut channels = Vec::new();
        for field in &self.fields {
            match (field, &date) {
                (Field::Latitude, _) => channels.push(self.along(self.latitude.as_ref(), f64::sin)?),
                (Field::Longitude, _) => {
                    channels.push(self.along(self.longitude.as_ref(), f64::sin)?);
                    channels.push(self.along(self.longitude.as_ref(), f64::cos)?);
                }
                (Field::DayOfYear, Some(date)) => {
                    let angle = TAU * date.day_of_year / date.year_days;
                    channels.push(self.along(None, |_| angle.sin())?);
                    channels.push(self.along(None, |_| angle.cos())?);
                }
                (Field::TimeOfDay, Some(date)) => {
                    let angle = TAU * date.fraction;
                    channels.push(self.along(self.longitude.as_ref(), |own| (angle + own).sin())?);
                    channels.push(self.along(self.longitude.as_ref(), |own| (angle + own).cos())?);
                }
                (Field::ToaRadiation, Some(date)) => channels.push(self.radiation(&Sun::at(date))?),
                // `new` refuses fields of time without a calendar.
                (_, None) => {
                    return Err(Error::Invalid(
                        "a field of time was asked for without a calendar".to_owned(),
                    ));
                }
            }
        }
        Ok(channels)
    }

    /// Radiation as a fraction of the solar constant.
    fn radiation(&self, sun: &Sun) -> Result<Tensor> {
        let (sin, cos) = sun.declination.sin_cos();
        let sines = self.along(self.latitude.as_ref(), |own| own.sin() * sin)?;
        let cosines = self.along(self.latitude.as_ref(), |own| own.cos() * cos)?;
        let hours = self.along(self.longitude.as_ref(), |own| (sun.hour_angle + own).cos())?;
        let zenith = sines.f_add(&cosines.f_mul(&hours)?)?.f_clamp_min(0.0)?;
        Ok(zenith.f_mul_scalar(sun.eccentricity)?)
    }

    /// A field that depends on the angles along one dim, or on none.
    fn along(&self, line: Option<&Line>, value: impl Fn(f64) -> f64) -> Result<Tensor> {
        let mut view = vec![1; self.shape.len()];
        let values: Vec<f64> = match line {
            Some(line) => {
                view[line.dim] = line.radians.len() as i64;
                line.radians.iter().map(|angle| value(*angle)).collect()
            }
            None => vec![value(0.0)],
        };
        Ok(Tensor::f_from_slice(&values)?.f_view(&view[..])?.f_expand(&self.shape[..], false)?)
    }
}

/// The angles of the window's points along the first dim of a kind.
fn line(dims: &[Dim], window: &[Range<usize>], kind: fn(&Dim) -> bool) -> Result<Option<Line>> {
    let Some(dim) = dims.iter().position(kind) else { return Ok(None) };
    let range = window[dim].clone();
    let points = dims[dim].coordinates.get(range.clone()).ok_or_else(|| Error::OutOfRange {
        what: format!("{} range", dims[dim].name),
        asked: format!("{range:?}"),
        available: dims[dim].coordinates.len(),
    })?;
    Ok(Some(Line { dim, radians: points.iter().map(|degrees| degrees.to_radians()).collect() }))
}
