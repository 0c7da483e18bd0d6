//! Traffic of GeoTransolver: sums over points.

use super::GeoTransolverConfig;
use crate::point_attention::traffic::{Points, layers};
use crate::traffic::{Split, Traffic};

/// A layer sums the features of its slices over the points of each stream; see [`layers`]. The context does so once over the geometry
/// and twice for each radius, and its slices are redistributed to the layout of the samples. The search within a radius runs in both
/// directions: from each stream over the geometry, and from the geometry over each stream.
pub(super) fn of(config: &GeoTransolverConfig, split: &Split) -> Option<Traffic> {
    let scales = config.scales().ok()?;
    let points = Points {
        width: config.n_hidden as i64,
        heads: config.n_head as i64,
        slices: config.slice_num as i64,
        grid: config.structured_shape.as_ref().map_or(0, Vec::len),
    };
    let rounds = config.n_layers + 2 + 2 * scales.len();
    // In both directions 3 coordinates of the points twice, of the candidates, and of the neighbours that are found.
    let searched: i64 = scales.iter().map(|(_, count)| 2 * 3 * (3 + count)).sum();
    let search = searched as f64 * split.points();
    let context = split.samples() * (points.slices * (points.width + 2 * points.heads)) as f64;
    // The blocks are applied to each stream.
    let streams = config.out_dim.each().len();
    let each = rounds as f64 * (layers(&points, split) + context) + search;
    Some(split.aligned().and(streams as f64 * each).uses(streams as u64))
}
