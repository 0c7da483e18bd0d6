//! Traffic of FLARE: sums over points.

use super::FlareConfig;
use crate::point_attention::traffic::{Points, layers};
use crate::traffic::{Split, Traffic};

/// A layer takes a maximum and a sum for each trained query; see [`layers`]. The features of each sample's time are redistributed to the
/// layout of the samples.
pub(super) fn of(config: &FlareConfig, split: &Split) -> Option<Traffic> {
    let points = Points {
        width: config.n_hidden as i64,
        heads: config.n_head as i64,
        slices: config.slice_num as i64,
        grid: 0,
    };
    let time = if config.time_input { config.n_hidden as f64 * split.samples() } else { 0.0 };
    Some(split.aligned().and(config.n_layers as f64 * layers(&points, split) + time))
}
