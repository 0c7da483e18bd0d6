//! Traffic of GeoTransolver: sums over points.

use super::GeoTransolverConfig;
use crate::point_attention::traffic::{Points, layers};
use crate::traffic::{Split, Traffic};

/// A layer sums the features of its slices over the points of each stream, see [`layers`]; the context does so once over the
/// geometry and once for each radius, and its slices are brought to where the samples of the points are. Neighbours in a radius are searched among all
/// points of the geometry, a ring of coordinates and features.
pub(super) fn of(config: &GeoTransolverConfig, split: &Split) -> Option<Traffic> {
    let radii = if config.include_local_features { config.radii.as_ref().map_or(2, Vec::len) } else { 0 };
    let points = Points {
        width: config.n_hidden as i64,
        heads: config.n_head as i64,
        slices: config.slice_num as i64,
        grid: config.structured_shape.as_ref().map_or(0, Vec::len),
    };
    let rounds = config.n_layers + 2 + 2 * radii;
    let search = radii as f64 * 4.0 * split.aligned().forward;
    let context = split.samples() * (points.slices * (points.width + 2 * points.heads)) as f64;
    // The blocks are applied to each stream.
    let streams = config.out_dim.each().len();
    let sums = (rounds * streams) as f64 * (layers(&points, split) + context);
    Some(split.aligned().and(sums + search).uses(streams as u64))
}
