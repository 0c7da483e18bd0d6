//! Sharding of AFNO over a mesh.

use isobar_shard::{ParameterLayouts, Placement};

use super::AfnoConfig;
use crate::sharding::Sharding;

pub(super) fn declare(config: &AfnoConfig) -> Sharding {
    positions(config.inp_shape, config.patch_size)
}

/// Splits the trained positions as the tokens are: in rows over the axis `domain`.
pub(crate) fn positions(inp_shape: [usize; 2], patch_size: [usize; 2]) -> Sharding {
    let tokens = [0, 1].map(|dim| inp_shape[dim] / patch_size[dim].max(1));
    let rows = [("domain", Placement::Shard(1))];
    let parameters = ParameterLayouts::new().with_blocks("pos_embed", &rows, tokens[1].max(1) as i64);
    Sharding::new().parameters(parameters).tokens(&tokens)
}
