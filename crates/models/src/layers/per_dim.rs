//! Arguments that are a number for all dims, or one for each.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One number for all dims, or one for each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a number, or a list of one for each dim")]
pub enum PerDim {
    /// For all dims.
    All(usize),
    /// For each dim, the first first.
    Each(Vec<usize>),
}

impl PerDim {
    /// As a list: the number `dims` times, or the list that it is, of any length.
    pub(crate) fn list(&self, dims: usize) -> Vec<usize> {
        match self {
            Self::All(number) => vec![*number; dims],
            Self::Each(numbers) => numbers.clone(),
        }
    }
}
