//! Traffic of ModAFNO: spectral transposes, and the modulation of samples.

use super::ModAfnoConfig;
use crate::afno::traffic::tokens;
use crate::traffic::{Split, Traffic};

/// Tokens move as in AFNO. The modulation is of each sample: its layers' scales and shifts are
/// redistributed to the layout of the samples.
pub(super) fn of(config: &ModAfnoConfig, split: &Split) -> Option<Traffic> {
    let width = config.embed_dim as i64;
    let groups = config.num_blocks.max(1) as i64;
    let size = width / groups;
    let hidden = (config.embed_dim as f64 * config.mlp_ratio) as i64;
    // A layer for each sample where the filter is modulated, and the hidden features.
    let modulation = 8 * groups * size * size + 8 * width + 2 * hidden + config.mod_dim as i64;
    let sizes = [config.embed_dim, config.depth];
    let channels = [config.in_channels, config.out_channels];
    let tokens = tokens(config.inp_shape, config.patch_size, sizes, channels, split);
    Some(tokens.and(config.depth as f64 * split.samples() * modulation as f64))
}
