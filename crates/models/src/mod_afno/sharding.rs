//! Sharding of the modulated AFNO over a mesh.

use super::ModAfnoConfig;
use crate::afno::positions;
use crate::sharding::Sharding;

pub(super) fn declare(config: &ModAfnoConfig) -> Sharding {
    positions(config.inp_shape, config.patch_size)
}
