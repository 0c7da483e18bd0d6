//! Dims and variables of a data set.

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
}

impl DataVariable {
    /// A scalar without a unit.
    pub fn scalar(name: impl Into<String>) -> Self {
        let name = name.into();
        let channels = vec![name.clone()];
        Self { name, unit: None, channels, has_direction: false, title: None }
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
    /// Attributes of the file that say where its values come from.
    pub attributes: Vec<(String, String)>,
    /// True if NaN marks missing values; a NaN is an error otherwise.
    pub missing: bool,
}
