//! Traffic of Aurora: shifts of windows.

use super::AuroraConfig;
use super::geometry::Geometry;
use super::stage::StageOptions;
use crate::traffic::{Grid, Split, Traffic};
use crate::windows::window_traffic;

/// Stages move their tokens to whole windows and shift them, see [`window_traffic`]; patches and the resamplings move the points by
/// which boundaries are rounded. All else is local to a column of patches.
pub(super) fn of(config: &AuroraConfig, split: &Split) -> Option<Traffic> {
    let geometry = Geometry::new(config).ok()?;
    let grid = split.grid(2);
    let stage = |options: StageOptions| {
        let [levels, rows, columns] = options.grid;
        let ends = (4 * levels * options.width) as f64 * grid.on(&[rows, columns]).halo(4);
        blocks(&options, &grid) + ends
    };
    let stages = (0..geometry.stages())
        .map(|i| stage(geometry.encoder_stage(i, false)) + stage(geometry.decoder_stage(i, false)));
    let channels = (config.in_channels() + config.out_channels()) as f64;
    Some(split.aligned().and(stages.sum::<f64>() + channels * grid.halo(2 * geometry.patch)))
}

/// Elements that the blocks of a stage receive.
fn blocks(options: &StageOptions, grid: &Grid) -> f64 {
    window_traffic(&options.windows(true), options.width, options.drop_path.len(), grid)
}
