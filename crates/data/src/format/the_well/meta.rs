//! Metadata of a file of The Well's schema.

use super::names::{DATASET_NAME, FIELDS, GRID_TYPE, PARAMETERS, SPATIAL_DIMS_COUNT, TIME, TRAJECTORIES};
use crate::{Error, Result};

/// Metadata of a file of The Well's schema, for [`WellWriter`](crate::WellWriter) and from
/// [`WellFile::meta`](crate::WellFile::meta).
///
/// ```
/// use isobar_data::{WellDim, WellMeta};
///
/// let n = 16;
/// let points: Vec<f64> = (0..n).map(|i| f64::from(i) / f64::from(n)).collect();
/// let dim = |name: &str| WellDim { name: name.to_owned(), coordinates: points.clone(), periodic: true };
/// let meta = WellMeta {
///     name: "navier_stokes_16".to_owned(),
///     trajectories: 10,
///     times: (0..20).map(f64::from).collect(),
///     dims: vec![dim("x"), dim("y")],
///     fields: vec![("vorticity".to_owned(), 0), ("velocity".to_owned(), 1)],
///     parameters: vec![("viscosity".to_owned(), 1e-3)],
///     ..WellMeta::default()
/// };
/// assert_eq!(meta.grid_type, "cartesian");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct WellMeta {
    /// Name of the data set.
    pub name: String,
    /// The kind of grid, `cartesian` by default.
    pub grid_type: String,
    /// Number of trajectories.
    pub trajectories: usize,
    /// Times of the frames, ascending; stored as float32.
    pub times: Vec<f64>,
    /// The spatial dims, 1 to 3, in the order in which the fields have them.
    pub dims: Vec<WellDim>,
    /// Names of the fields, and their order: 0 for a scalar, 1 for a vector, 2 for a tensor.
    pub fields: Vec<(String, usize)>,
    /// The simulation's parameters.
    pub parameters: Vec<(String, f64)>,
    /// Units of fields that have one, by the fields' names.
    pub units: Vec<(String, String)>,
    /// Units of the times (`time`) and of dims that have one, by name: attributes `units`, which The Well's schema does not define and
    /// its readers ignore. Times with a unit are stored as float64 if float32 does not hold them exactly.
    pub coordinate_units: Vec<(String, String)>,
    /// CF's name of the calendar of the times.
    pub calendar: Option<String>,
    /// Names of the fields that are the same in all trajectories and at all times: they are stored and written once, as frame 0 of
    /// trajectory 0.
    pub constants: Vec<String>,
}

/// A spatial dim of a [`WellMeta`].
#[derive(Clone, Debug, PartialEq)]
pub struct WellDim {
    /// Name of the dim, such as `x`.
    pub name: String,
    /// Coordinates of its points, ascending; stored as float32.
    pub coordinates: Vec<f64>,
    /// True if the dim is periodic.
    pub periodic: bool,
}

impl Default for WellMeta {
    /// On a cartesian grid, all else empty.
    fn default() -> Self {
        Self {
            name: String::new(),
            grid_type: "cartesian".to_owned(),
            trajectories: 0,
            times: Vec::new(),
            dims: Vec::new(),
            fields: Vec::new(),
            parameters: Vec::new(),
            units: Vec::new(),
            coordinate_units: Vec::new(),
            calendar: None,
            constants: Vec::new(),
        }
    }
}

impl WellMeta {
    /// Unit of the times, or of the coordinates of a dim.
    pub(super) fn coordinate_unit(&self, name: &str) -> Option<&str> {
        self.coordinate_units.iter().find(|(own, _)| own == name).map(|(_, unit)| unit.as_str())
    }

    /// Returns whether times are stored as float64: dates have more digits than float32.
    pub(super) fn has_double_times(&self) -> bool {
        let is_exact = |time: &f64| f64::from(*time as f32) == *time;
        self.coordinate_unit(TIME).is_some() && !self.times.iter().all(is_exact)
    }

    /// Refuses what [`WellFile`](crate::WellFile) would refuse to open.
    pub(super) fn check(&self) -> Result<()> {
        if self.trajectories == 0 || self.fields.is_empty() || !(1..=3).contains(&self.dims.len()) {
            return Err(Error::Invalid(format!(
                "a file of {} trajectories, {} fields and {} spatial dims can't be written: expected at least one \
                 trajectory and field, and 1 to 3 dims",
                self.trajectories,
                self.fields.len(),
                self.dims.len()
            )));
        }
        if let Some((name, order)) = self.fields.iter().find(|(_, order)| *order >= FIELDS.len()) {
            return Err(Error::Invalid(format!(
                "the field `{name}` is of order {order}: expected 0 for a scalar, 1 for a vector, 2 for a tensor"
            )));
        }
        if let Some((name, value)) = self.parameters.iter().find(|(_, value)| !(*value as f32).is_finite()) {
            return Err(Error::Invalid(format!(
                "the parameter `{name}` is {value}: expected a finite number"
            )));
        }
        ascending(TIME, &self.times, self.has_double_times())?;
        for dim in &self.dims {
            ascending(&dim.name, &dim.coordinates, false)?;
        }
        if self.name.contains('\0') || self.grid_type.contains('\0') {
            return Err(Error::Invalid("a name holds a zero byte".to_owned()));
        }
        names("spatial dim", self.dims.iter().map(|dim| &*dim.name), &[TIME])?;
        let unknown = |name: &str| !self.fields.iter().any(|(field, _)| field == name);
        if let Some((name, unit)) =
            self.units.iter().find(|(name, unit)| unknown(name) || unit.contains('\0'))
        {
            return Err(Error::Invalid(format!(
                "the unit {unit:?} of `{name}` can't be written: expected a text without zero bytes, for one of the fields"
            )));
        }
        let texts = self.coordinate_units.iter().map(|(_, unit)| unit).chain(&self.calendar);
        if let Some(text) = texts.into_iter().find(|text| text.contains('\0')) {
            return Err(Error::Invalid(format!(
                "the unit or calendar {text:?} can't be written: expected a text without zero bytes"
            )));
        }
        names("field", self.fields.iter().map(|(name, _)| &**name), &[])?;
        let taken = [DATASET_NAME, GRID_TYPE, SPATIAL_DIMS_COUNT, TRAJECTORIES, PARAMETERS];
        names("parameter", self.parameters.iter().map(|(name, _)| &**name), &taken)
    }
}

/// Checks that points are finite and ascending as stored, in float64 or float32: rounding can merge close points.
fn ascending(name: &str, values: &[f64], is_double: bool) -> Result<()> {
    let stored: Vec<f64> =
        values.iter().map(|&value| if is_double { value } else { f64::from(value as f32) }).collect();
    let finite = stored.iter().all(|value| value.is_finite());
    if values.is_empty() || !finite || stored.windows(2).any(|pair| pair[0] >= pair[1]) {
        let dtype = if is_double { "float64" } else { "float32" };
        return Err(Error::Invalid(format!(
            "the points of `{name}` must be finite and ascending in {dtype}, at least one"
        )));
    }
    Ok(())
}

/// That names can be links or attributes, and differ.
fn names<'a>(what: &str, names: impl Iterator<Item = &'a str>, taken: &[&str]) -> Result<()> {
    let mut seen = taken.to_vec();
    for name in names {
        if name.is_empty() || name == "." || name.contains(['/', '\0']) {
            return Err(Error::Invalid(format!("{name:?} can't be the name of a {what}")));
        }
        if seen.contains(&name) {
            return Err(Error::Invalid(format!("`{name}` can't be the name of a {what}: it is taken")));
        }
        seen.push(name);
    }
    Ok(())
}
