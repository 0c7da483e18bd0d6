//! Traffic of layers of attention between points.

use crate::traffic::Split;

/// Sizes of a layer.
pub(crate) struct Points {
    pub(crate) width: i64,
    pub(crate) heads: i64,
    pub(crate) slices: i64,
    /// Number of dims of the grid whose points are convolved; 0 for points without a grid.
    pub(crate) grid: usize,
}

/// Elements that a layer receives: the sums over points of the features of each slice and of the weights, a maximum of each slice,
/// and, on a grid, the halos of two convolutions of 3 points. None of them grows with the number of points of a rank.
pub(crate) fn layers(points: &Points, split: &Split) -> f64 {
    let grid = split.grid(points.grid.max(1));
    let sums = grid.summed(points.slices * (points.width + 2 * points.heads));
    let convolved = if points.grid > 0 { 2.0 * grid.convolved(points.width, 3, 1) } else { 0.0 };
    sums + convolved
}
