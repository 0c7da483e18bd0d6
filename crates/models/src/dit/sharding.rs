//! Sharding of DiT over a mesh.

use super::DitConfig;
use crate::layers::split_positions;
use crate::sharding::Sharding;

pub(super) fn declare(config: &DitConfig) -> Sharding {
    let name = config.has_positions().then_some("tokenizer.pos_embed");
    split_positions(name, &config.input_size.list(2), &config.patch_size.list(2))
}
