//! Dims and variables of a data set.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::attributes::{LONG_NAME, TextAttributes};

/// A spatial dim of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct Dim {
    /// Name, such as `x` or `latitude`.
    pub name: String,
    /// Unit of the coordinates, if the data have one.
    pub unit: Option<String>,
    /// Coordinates of its points, ascending or descending.
    pub coordinates: Vec<f64>,
    /// True if the first point follows the last.
    pub periodic: bool,
}

impl Dim {
    /// Returns whether these are latitudes: by the unit, `degrees_north` in one of CF's spellings, or, if that says nothing, by the
    /// name `lat` or `latitude`. Points 0, 1, 2, … without a unit are numbers of rows, as data without coordinates have them.
    pub fn is_latitude(&self) -> bool {
        self.is_degrees("north", ["lat", "latitude"]) && !self.is_numbered()
    }

    /// Returns whether these are longitudes: by the unit `degrees_east`, or the name `lon` or `longitude`. Points 0, 1, 2, … without
    /// a unit are numbers of columns, unless they are 360.
    pub fn is_longitude(&self) -> bool {
        self.is_degrees("east", ["lon", "longitude"])
            && (!self.is_numbered() || self.coordinates.len() == 360)
    }

    /// Returns whether the last coordinate is below the first.
    pub fn descends(&self) -> bool {
        matches!(&self.coordinates[..], [first, .., last] if last < first)
    }

    pub(crate) fn is_numbered(&self) -> bool {
        self.unit.is_none() && self.coordinates.iter().enumerate().all(|(at, point)| *point == at as f64)
    }

    /// CF's standard name of the coordinates, if the unit is that of latitudes or longitudes.
    pub(crate) fn standard_name(&self) -> Option<&'static str> {
        let unit = self.unit.as_deref()?;
        let is = |place: &str| degrees_of(unit, place) == Some(true);
        is("north").then_some("latitude").or_else(|| is("east").then_some("longitude"))
    }

    /// Returns whether the unit is `degrees_PLACE` in one of CF's spellings, or says nothing and the name is one of these.
    fn is_degrees(&self, place: &str, names: [&str; 2]) -> bool {
        degrees_of(self.unit.as_deref().unwrap_or_default(), place)
            .unwrap_or_else(|| names.iter().any(|name| self.name.eq_ignore_ascii_case(name)))
    }
}

/// Returns whether a unit is `degrees_PLACE` in one of CF's spellings, such as `degrees_east`, `degree_E` and `degreesE`; `None` for no
/// unit, and for degrees without a place.
pub(crate) fn degrees_of(unit: &str, place: &str) -> Option<bool> {
    let unit = unit.trim().to_ascii_lowercase();
    match unit.strip_prefix("degrees").or_else(|| unit.strip_prefix("degree")) {
        Some(direction) if !direction.is_empty() => {
            Some([place, &place[..1]].contains(&direction.trim_start_matches(['_', ' '])))
        }
        None if !["", "deg", "°"].contains(&&unit[..]) => Some(false),
        _ => None,
    }
}

/// A variable of a data set: a scalar, a vector or a tensor at each point.
#[derive(Clone, Debug, PartialEq)]
pub struct DataVariable {
    /// Name in `data.fields`, `data.inputs` and `data.targets`.
    pub name: String,
    /// Unit of the values, if the data have one.
    pub unit: Option<String>,
    /// Name of each channel; of a scalar the variable's own.
    pub channels: Vec<String>,
    /// True if its channels are components of a vector or tensor, which change if the axes are exchanged.
    pub has_direction: bool,
    /// Title in pictures, if it is not the name.
    pub title: Option<String>,
    /// True if it has no spatial dims: each sample, or each of its frames, has one value.
    pub uniform: bool,
    /// True if it has neither samples nor times, such as a land-sea mask: it is the same in all samples and frames.
    pub is_static: bool,
    /// Coordinates of the channels, such as pressure levels; `None` if they have none, such as components of a vector.
    pub levels: Option<Levels>,
    /// Attributes of CF, such as the standard name.
    pub attributes: TextAttributes,
}

/// Coordinates of the channels of a variable, such as pressure levels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Levels {
    /// Name of the axis, such as `level`.
    pub name: String,
    /// Unit of the coordinates, such as `hPa`.
    pub unit: Option<String>,
    /// Coordinate of each channel.
    pub values: Vec<f64>,
}

impl Levels {
    /// Returns whether these are the coordinates of `other`, but for rounding, in a unit that does not differ from its unit.
    pub fn is_at(&self, other: &Self) -> bool {
        let near = |(own, other): (&f64, &f64)| (own - other).abs() <= 1e-6 * own.abs().max(other.abs());
        let units_differ = self.unit.is_some() && other.unit.is_some() && self.unit != other.unit;
        !units_differ
            && self.values.len() == other.values.len()
            && self.values.iter().zip(&other.values).all(near)
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = self.unit.as_ref().map(|unit| format!(" {unit}")).unwrap_or_default();
        write!(f, "{} {:?}{unit}", self.name, self.values)
    }
}

impl DataVariable {
    /// A scalar without a unit.
    pub fn scalar(name: impl Into<String>) -> Self {
        let name = name.into();
        let channels = vec![name.clone()];
        Self {
            name,
            unit: None,
            channels,
            has_direction: false,
            title: None,
            uniform: false,
            is_static: false,
            levels: None,
            attributes: TextAttributes::default(),
        }
    }

    /// The variable as fields that vary in space and time, such as predictions.
    #[must_use]
    pub fn varying(self) -> Self {
        Self { uniform: false, is_static: false, ..self }
    }

    /// Returns whether files have an axis for the channels: of scalars without a level they have none.
    pub fn has_channel_axis(&self) -> bool {
        self.channels.len() > 1 || self.levels.is_some()
    }

    /// Attributes of CF in files: those of the data, and the title if the data have no `long_name`.
    pub(crate) fn stored_attributes(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let title = self.title.as_deref().filter(|_| self.attributes.get(LONG_NAME).is_none());
        self.attributes.iter().chain(title.map(|title| (LONG_NAME, title)))
    }

    /// Title in pictures.
    pub fn title(&self) -> &str {
        self.title.as_deref().unwrap_or(&self.name)
    }
}

/// Content of a file of predictions, except its values.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictionMeta {
    /// Name of the data set, for layouts that store one.
    pub name: String,
    /// Variables to write, by name.
    pub variables: Vec<String>,
    /// Number of samples or trajectories.
    pub samples: usize,
    /// Times of the frames of each trajectory; empty for samples without time.
    pub times: Vec<f64>,
    /// Time of each sample, for samples without frames that have one, in any order; else empty. Formats write it as the variable `time`
    /// of the axis of samples; PDEBench's layout of Darcy flow leaves it out, with a warning.
    pub sample_times: Vec<f64>,
    /// Numbers of the samples in the data set that they come from, the coordinates of the axis of samples; empty for 0, 1, 2, …
    pub sample_numbers: Vec<usize>,
    /// Attributes of the file that say where its values come from. They replace those of the data set, except that a text of `history` is
    /// added to its history.
    pub attributes: Vec<(String, String)>,
    /// True if NaN marks missing values; a NaN is an error otherwise.
    pub missing: bool,
    /// Names of the [parameters](crate::Dataset::parameters) that the file does not get: those that joined files have different
    /// numbers of.
    pub left_out: Vec<String>,
}

impl PredictionMeta {
    /// Coordinates of the axis of samples.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        match self.sample_numbers.is_empty() {
            true => (0..self.samples).map(|at| at as f64).collect(),
            false => self.sample_numbers.iter().map(|&number| number as f64).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_rows_are_no_degrees() {
        let dim = |name: &str, unit: Option<&str>, first: i32, count: i32| Dim {
            name: name.to_owned(),
            unit: unit.map(str::to_owned),
            coordinates: (first..first + count).map(f64::from).collect(),
            periodic: false,
        };
        assert!(!dim("lat", None, 0, 32).is_latitude() && dim("lat", None, 1, 32).is_latitude());
        assert!(dim("lat", Some("degrees_north"), 0, 32).is_latitude());
        assert!(!dim("lon", None, 0, 64).is_longitude() && dim("lon", None, 0, 360).is_longitude());
        for unit in ["degrees_east", "degree_east", "degrees_E", "degree_E", "degreesE", "degreeE"] {
            let dim = dim("x", Some(unit), 0, 4);
            assert!(dim.is_longitude() && dim.standard_name() == Some("longitude"), "{unit}");
        }
        assert_eq!(dim("lat", Some("degrees"), 1, 4).standard_name(), None);
        assert!(!dim("lat", Some("degree_kelvin"), 1, 4).is_latitude());
    }
}
