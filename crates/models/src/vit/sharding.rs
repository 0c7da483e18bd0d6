//! Sharding of the vision transformer over a mesh.

use super::{VitConfig, VitPositions};
use crate::layers::split_positions;
use crate::sharding::Sharding;

pub(super) fn declare(config: &VitConfig) -> Sharding {
    let name = (config.pos_embed == VitPositions::Learned).then_some("pos_embed");
    split_positions(name, &config.inp_shape.list(2), &config.patch_size.list(2))
}
