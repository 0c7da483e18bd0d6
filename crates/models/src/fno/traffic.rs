//! Traffic of FNO: the modes that are kept.

use super::{FnoConfig, Sizes};
use crate::traffic::{Split, Traffic};

/// Each layer receives its share of the kept modes from every rank, or of the lines that it transforms, and the kept modes to
/// evaluate its own points: at most a complex number for each mode and each of its points, and feature. Padding goes to the last ranks.
pub(super) fn of(config: &FnoConfig, split: &Split) -> Option<Traffic> {
    let sizes = Sizes::new(config).ok()?;
    let grid = split.grid(config.dimension);
    // Of every dim but the last, also the negative frequencies.
    let kept: i64 = sizes.modes.iter().product::<i64>() << (sizes.modes.len() - 1);
    let padded = grid.padded(&sizes.padding);
    let modes = if grid.is_split() { split.samples() * (2 * kept) as f64 } else { 0.0 };
    let layer = sizes.latent as f64 * (modes + 2.0 * padded.moved());
    let ends = config.out_channels as f64 * padded.moved();
    Some(split.aligned().and(config.num_fno_layers as f64 * layer + ends))
}
