//! Weights of points by the area of their cells.

use std::ops::Range;

use crate::grid::Dim;

/// Returns the dim of latitudes, if there is one, and the weight of each of its points, 1 on average: the difference of the sines
/// of the latitudes that bound its cell, which is its area. Bounds are half-way between points, and at most at the poles.
///
/// A dim is one of latitudes by its unit or name: see [`Dim::is_latitude`].
///
/// ```
/// use isobar_data::{Dim, area_weights};
///
/// let dim = Dim { name: "lat".into(), unit: None, coordinates: vec![60.0, 0.0, -60.0], periodic: false };
/// let (_, weights) = area_weights(&[dim]).unwrap();
/// // Cells from 90 to 30, 30 to -30 and -30 to -90 degrees: a quarter, a half and a quarter of the sphere.
/// assert!(weights.iter().zip([0.75, 1.5, 0.75]).all(|(found, exact)| (found - exact).abs() < 1e-12));
/// ```
pub fn area_weights(dims: &[Dim]) -> Option<(usize, Vec<f64>)> {
    let at = dims.iter().position(Dim::is_latitude)?;
    let points = &dims[at].coordinates;
    if points.len() < 2 || !points.iter().all(|latitude| latitude.abs() <= 90.0 + 1e-6) {
        return None;
    }
    let last = points.len() - 1;
    let bound = |before: usize| {
        let (one, other) = (points[before - 1], points[before]);
        0.5 * (one + other)
    };
    let area = |point: usize| {
        // The outermost cells end as far beyond their points as they begin before them.
        let low = if point == 0 { 2.0 * points[0] - bound(1) } else { bound(point) };
        let high = if point == last { 2.0 * points[last] - bound(last) } else { bound(point + 1) };
        let sine = |latitude: f64| latitude.clamp(-90.0, 90.0).to_radians().sin();
        (sine(high) - sine(low)).abs()
    };
    let areas: Vec<f64> = (0..points.len()).map(area).collect();
    let mean = areas.iter().sum::<f64>() / areas.len() as f64;
    (mean > 0.0).then(|| (at, areas.into_iter().map(|area| area / mean).collect()))
}

/// Weights of the points of a window by cell area; all 1 without latitudes.
#[derive(Debug)]
pub(crate) struct PointWeights {
    /// The dim along which they vary, and those of its points.
    along: Option<(usize, Vec<f64>)>,
}

impl PointWeights {
    /// Returns the weights of all points.
    pub(crate) fn new(dims: &[Dim]) -> Self {
        Self { along: area_weights(dims) }
    }

    /// Returns the weights of the points of a window.
    pub(crate) fn within(&self, points: &[Range<usize>]) -> Self {
        let within = |(dim, weights): &(usize, Vec<f64>)| {
            let own = weights.get(points.get(*dim)?.clone())?;
            Some((*dim, own.to_vec()))
        };
        Self { along: self.along.as_ref().and_then(within) }
    }

    /// Returns, for values `[…, x, …]` in C order with `shape` as spatial extents, how many consecutive values share a weight, and
    /// the weights in turn.
    pub(crate) fn in_turn(&self, shape: &[i64]) -> (usize, &[f64]) {
        match &self.along {
            Some((dim, weights)) => {
                let inner = shape.iter().skip(dim + 1).map(|&extent| extent as usize);
                (inner.product::<usize>().max(1), weights)
            }
            None => (shape.iter().map(|&extent| extent as usize).product::<usize>().max(1), &[1.0]),
        }
    }
}
