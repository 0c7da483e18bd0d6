//! Types of arguments.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Features of the points of one or several streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a number of features, or a list of such numbers")]
pub enum Streams {
    /// Features of the only stream.
    One(usize),
    /// Features of each stream, in order.
    Each(Vec<usize>),
}

impl Streams {
    /// Returns the features of each stream.
    pub(super) fn each(&self) -> &[usize] {
        match self {
            Self::One(features) => std::slice::from_ref(features),
            Self::Each(features) => features,
        }
    }
}

/// Attention within the points.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GeoAttention {
    /// By way of slices, as in Transolver; slices attend to the context.
    #[default]
    #[serde(rename = "GALE")]
    Gale,
    /// By way of trained queries, as in FLARE; points attend to the context.
    #[serde(rename = "GALE_FA")]
    GaleFa,
}

/// Joining of the results s of the attention within the points and c of the attention to the context.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StateMixing {
    /// g s + (1 − g) c with a trained number g in (0, 1) for each block.
    #[default]
    Weighted,
    /// gelu(W [s, c] + b)
    ConcatProject,
}
