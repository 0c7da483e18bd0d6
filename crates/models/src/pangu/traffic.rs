//! Traffic of Pangu: shifts of windows.

use super::PanguConfig;
use super::model::Geometry;
use crate::traffic::{Split, Traffic};
use crate::windows::StageOptions;

/// Stages move their tokens to whole windows and shift them, see [`StageOptions::traffic`]; patches and the resamplings move the points
/// by which boundaries are rounded. The tables of biases are parameters.
pub(super) fn of(config: &PanguConfig, split: &Split) -> Option<Traffic> {
    let geometry = Geometry::new(config).ok()?;
    let grid = split.grid(2);
    let stage = |stage: usize| -> StageOptions<'static> { geometry.stage(stage, &[], false) };
    let stages = [(0, 2), (1, 6), (2, 6), (3, 2)].map(|(i, blocks)| stage(i).traffic(blocks, &grid));
    let ends = stage(0).ends(&grid) + stage(1).ends(&grid);
    let inputs = geometry.channels.inputs() as f64;
    Some(split.aligned().and(stages.iter().sum::<f64>() + ends + inputs * grid.halo(2 * geometry.rounding())))
}
