//! Sharding of the channel-parallel AFNO over a mesh.
//!
//! Its parameters name their split dims themselves, along whichever ranks share the model.

use super::DistributedAfnoConfig;
use crate::sharding::Sharding;

pub(super) fn declare(config: &DistributedAfnoConfig) -> Sharding {
    Sharding::new().tokens(&config.inp_shape.map(|extent| extent / config.patch_size.max(1)))
}
