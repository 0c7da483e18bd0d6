//! Sharding of DiT over a mesh.

use super::DitConfig;
use crate::layers::split_positions;
use crate::sharding::Sharding;

pub(super) fn declare(config: &DitConfig) -> Sharding {
    let name = config.has_positions().then_some("tokenizer.pos_embed");
    let extents = config.input_size.list(2);
    split_positions(name, &extents, &config.patch_size.list(extents.len()))
}
