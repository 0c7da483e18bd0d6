//! Traffic of a vision transformer: keys and values.

use super::VitConfig;
use crate::traffic::{Split, Traffic, attention};

/// Each block attends to all tokens or to a window of them; see [`attention`]. The fields may be cut otherwise than the patches are.
pub(super) fn of(config: &VitConfig, split: &Split) -> Option<Traffic> {
    let grid = split.grid(2);
    let extents: Vec<i64> = config.inp_shape.list(2).iter().map(|&extent| extent as i64).collect();
    let patch = config.patch_size.list(2);
    let tokens = grid.on(&extents.iter().zip(&patch).map(|(n, &p)| n / p.max(1) as i64).collect::<Vec<_>>());
    let width = config.embed_dim as i64;
    let kernel = config.attn_kernel.as_ref().and_then(|kernel| kernel.list(2).into_iter().max());
    let kernel = kernel.map(|kernel| kernel as i64);
    let blocks = config.depth as f64 * attention(&tokens, width, kernel);
    let rows: Vec<i64> = patch.iter().map(|&extent| extent as i64).collect();
    let cut = config.in_channels as f64 * grid.halo_each(&rows);
    let ends = cut + width as f64 * tokens.moved() + config.out_channels as f64 * grid.moved();
    Some(split.aligned().and(blocks + ends))
}
