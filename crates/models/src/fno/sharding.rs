//! Sharding of the FNO over a mesh.

use isobar_nn::Factorization;
use isobar_shard::{ParameterLayouts, Placement};

use super::FnoConfig;
use crate::sharding::Sharding;

/// Splits the spectral weights `[in, out, modes…, 2]` along the modes of the last spatial dim. The transform of fields whose
/// first spatial dim is split leaves the modes so; each rank then multiplies its own modes by its own weights. In one
/// dimension no other dim of modes is left to split, and factored weights are small.
pub(super) fn declare(config: &FnoConfig) -> Sharding {
    if config.dimension < 2 || config.factorization != Factorization::None {
        return Sharding::new();
    }
    let last_modes = [("domain", Placement::Shard(1 + config.dimension))];
    let weights = "spec_encoder.spconv_layers.*.weights*";
    Sharding::new().parameters(ParameterLayouts::new().with(weights, &last_modes))
}
