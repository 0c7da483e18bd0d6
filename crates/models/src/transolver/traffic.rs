//! Traffic of Transolver: sums over points.

use super::TransolverConfig;
use crate::point_attention::traffic::{Points, layers};
use crate::traffic::{Split, Traffic};

/// A layer sums the features of its slices over the points, and on a grid convolves them; see [`layers`]. The features of each sample's
/// time are redistributed to the layout of the samples.
pub(super) fn of(config: &TransolverConfig, split: &Split) -> Option<Traffic> {
    let points = Points {
        width: config.n_hidden as i64,
        heads: config.n_head as i64,
        slices: config.slice_num as i64,
        grid: config.structured_shape.as_ref().map_or(0, Vec::len),
    };
    let time = if config.time_input { config.n_hidden as f64 * split.samples() } else { 0.0 };
    Some(split.aligned().and(config.n_layers as f64 * layers(&points, split) + time))
}
