//! Attributes of CF that coordinates get in files.

use super::{ChannelAxis, TIME};
use crate::attributes::STANDARD_NAME;
use crate::calendar::TimeUnit;
use crate::grid::Dim;

/// Names and texts of attributes.
pub(crate) type Texts<'a> = Vec<(&'static str, &'a str)>;

/// Attribute of CF: unit of the values.
pub(crate) const UNITS: &str = "units";
const AXIS: &str = "axis";

/// Units of pressure, in lower case, by which CF knows vertical coordinates.
const PRESSURES: [&str; 9] = ["pa", "hpa", "kpa", "mb", "mbar", "millibar", "millibars", "bar", "dbar"];

impl Dim {
    /// Attributes of its coordinates: the unit, and of latitudes and longitudes the standard name and the axis.
    pub(crate) fn attributes(&self) -> Texts<'_> {
        let name = self.standard_name();
        let axis = name.map(|name| if name == "latitude" { "Y" } else { "X" });
        given([(UNITS, self.unit.as_deref()), (STANDARD_NAME, name), (AXIS, axis)])
    }
}

impl ChannelAxis<'_> {
    /// Attributes of its coordinates: the unit, and of pressures the vertical axis.
    pub(crate) fn attributes(&self) -> Texts<'_> {
        let unit = self.unit();
        let is_pressure = unit.is_some_and(|unit| PRESSURES.contains(&&*unit.trim().to_ascii_lowercase()));
        let of_pressure = |text| is_pressure.then_some(text);
        given([(UNITS, unit), (AXIS, of_pressure("Z")), ("positive", of_pressure("down"))])
    }
}

/// Attributes of times: of the frames, which are an axis, or of the samples.
pub(crate) fn of_times(unit: Option<&TimeUnit>, is_axis: bool) -> Texts<'_> {
    given([
        (UNITS, unit.map(|unit| &*unit.unit)),
        ("calendar", unit.and_then(|unit| unit.calendar.as_deref())),
        (STANDARD_NAME, unit.map(|_| TIME)),
        (AXIS, unit.filter(|_| is_axis).map(|_| "T")),
    ])
}

fn given<'a, const N: usize>(all: [(&'static str, Option<&'a str>); N]) -> Texts<'a> {
    all.into_iter().filter_map(|(name, text)| Some((name, text?))).collect()
}
