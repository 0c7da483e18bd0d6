//! Options of formats of named arrays.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Arrays of the variables, and the meaning of each axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ArrayOptions {
    /// Paths of variables and coordinates that are stored under another name: `{ u = "fields/velocity" }`, or with more:
    /// `{ a = { path = "x", axes = ["sample", "x", "y"] } }`, `{ time = { path = "clock", unit = "hours since 2000-01-01" } }`.
    pub variables: BTreeMap<String, VariableOptions>,
    /// Names of the axes of arrays that do not store them, in order, such as ["sample", "time", "x", "y"]. Those that are not
    /// samples, times or channels are spatial dims.
    pub axes: Vec<String>,
    /// Name of the axis of samples or trajectories. Without it there is one trajectory.
    pub sample: String,
    /// Name of the time axis. If no variable has an axis of the default name, the time axis is the one whose coordinates have a
    /// unit such as `hours since 2000-01-01`.
    pub time: String,
    /// Name of the axis of channels, such as vector components or pressure levels.
    pub channel: String,
    /// Arrays of coordinates that do not have the name of their axis: `{ x = "grid/x" }`.
    pub coordinates: BTreeMap<String, String>,
    /// Spatial dims whose first point follows the last. Longitudes that go around the globe are found by their unit.
    pub periodic: Vec<String>,
    /// Number of steps of the segments into which each trajectory is split. The last frame of a segment is the first of the next;
    /// steps after the last complete segment are left out, with a warning.
    #[schemars(range(min = 1))]
    pub cut: Option<usize>,
}

impl Default for ArrayOptions {
    fn default() -> Self {
        Self {
            variables: BTreeMap::new(),
            axes: Vec::new(),
            sample: "sample".to_owned(),
            time: "time".to_owned(),
            channel: "channel".to_owned(),
            coordinates: BTreeMap::new(),
            periodic: Vec::new(),
            cut: None,
        }
    }
}

/// Place of a variable.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum VariableOptions {
    /// The path of its array.
    Path(String),
    /// The path of its array, and more.
    Table(VariableTable),
}

/// Place of a variable, and facts that its array lacks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VariableTable {
    /// Path of the array.
    pub path: String,
    /// Names of its axes.
    #[serde(default)]
    pub axes: Option<Vec<String>>,
    /// Unit of its values.
    #[serde(default)]
    pub unit: Option<String>,
}

impl VariableOptions {
    /// The path of the array.
    pub fn path(&self) -> &str {
        match self {
            Self::Path(path) => path,
            Self::Table(table) => &table.path,
        }
    }

    pub(super) fn axes(&self) -> Option<&[String]> {
        match self {
            Self::Table(table) => table.axes.as_deref(),
            Self::Path(_) => None,
        }
    }

    pub(super) fn unit(&self) -> Option<&str> {
        match self {
            Self::Table(table) => table.unit.as_deref(),
            Self::Path(_) => None,
        }
    }
}

// By hand: an untagged enum does not say which key of the table is wrong.
impl<'de> Deserialize<'de> for VariableOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(path) => Ok(Self::Path(path)),
            table => VariableTable::deserialize(table).map(Self::Table).map_err(D::Error::custom),
        }
    }
}
