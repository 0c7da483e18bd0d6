//! The inputs and outputs of a model: arrays by name.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// Named arrays: a model's inputs, or its outputs.
///
/// The names that training programs use are constants of this type; a model may define others.
///
/// ```
/// use isobar_models::Batch;
/// use tch::{Device, Kind, Tensor};
///
/// let fields = Tensor::zeros([2, 3, 16, 16], (Kind::Float, Device::Cpu));
/// let times = Tensor::zeros([2, 1], (Kind::Float, Device::Cpu));
/// let batch = Batch::of_fields(fields).with(Batch::<Tensor>::TIME, times);
/// assert_eq!(batch.names().collect::<Vec<_>>(), ["fields", "time"]);
/// assert!(batch.get("positions").is_none());
/// ```
#[derive(Debug)]
pub struct Batch<A>(BTreeMap<String, A>);

impl<A> Default for Batch<A> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<A> Batch<A> {
    /// Fields on a grid, `[batch, channel, spatial…]`.
    pub const FIELDS: &'static str = "fields";
    /// Time or noise level of each sample, `[batch, 1]`.
    pub const TIME: &'static str = "time";
    /// Noise level of each sample, `[batch]` or `[1]`.
    pub const SIGMA: &'static str = "sigma";
    /// Conditions of each sample, `[batch, feature]`; of a denoiser also fields `[batch, channel, spatial…]`.
    pub const CONDITIONS: &'static str = "conditions";
    /// Class labels or other numbers of each sample, `[batch, feature]`, for models whose conditions are fields.
    pub const CLASS_LABELS: &'static str = "class_labels";
    /// Invalid points of each sample, `[batch, spatial…]` or `[batch, 1, spatial…]`: true, or above 0.
    pub const INVALID_MASK: &'static str = "invalid_mask";
    /// Rows and columns of the points of patches on the grid, `[patch, 2, height, width]` (`Int64`); see
    /// [`Patching`](crate::Patching).
    pub const GLOBAL_INDEX: &'static str = "global_index";
    /// Positions of points, `[point, coordinate]` or `[batch, point, coordinate]`.
    pub const POSITIONS: &'static str = "positions";
    /// Pairs of connected points, `[2, edge]`.
    pub const EDGES: &'static str = "edges";

    /// Makes a batch of fields alone.
    pub fn of_fields(fields: A) -> Self {
        Self(BTreeMap::from([(Self::FIELDS.to_owned(), fields)]))
    }

    /// Adds an array; an earlier one of the same name is replaced.
    #[must_use]
    pub fn with(mut self, name: &str, array: A) -> Self {
        self.0.insert(name.to_owned(), array);
        self
    }

    /// Returns the array of that name.
    pub fn get(&self, name: &str) -> Option<&A> {
        self.0.get(name)
    }

    /// Returns the array of that name, which the model `model` cannot do without.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if the batch lacks it.
    pub fn require(&self, model: &'static str, name: &str) -> Result<&A> {
        self.get(name).ok_or_else(|| Error::Missing {
            model,
            name: name.to_owned(),
            given: self.names().map(str::to_owned).collect(),
        })
    }

    /// Removes the array of that name and returns it.
    pub fn take(&mut self, name: &str) -> Option<A> {
        self.0.remove(name)
    }

    /// The names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}
