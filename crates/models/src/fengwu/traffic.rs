//! Traffic of FengWu: shifts of windows.

use super::FengwuConfig;
use super::layers::{Geometry, VARIABLES};
use crate::traffic::{Split, Traffic};

/// An encoder and a decoder for each of 6 variables and the blocks over all of them, see
/// [`StageOptions::traffic`](crate::windows::StageOptions::traffic); patches and resamplings move the points by which boundaries are
/// rounded.
pub(super) fn of(config: &FengwuConfig, split: &Split) -> Option<Traffic> {
    let geometry = Geometry::new(config).ok()?;
    let grid = split.grid(2);
    let (outer, inner) = (geometry.outer(&[]), geometry.inner(1, &[]));
    // Two ends of each stage: patches or a resampling, and the skip connection or the slice of the blocks over all variables.
    let ends = 2.0 * (outer.ends(&grid) + inner.ends(&grid));
    let coder = outer.traffic(2, &grid) + inner.traffic(6, &grid) + ends;
    let fuser = geometry.inner(VARIABLES, &[]).traffic(6, &grid);
    let fields = config.channels() as f64 * grid.halo(2 * geometry.rounding());
    Some(split.aligned().and(2.0 * VARIABLES as f64 * coder + fuser + 2.0 * fields))
}
