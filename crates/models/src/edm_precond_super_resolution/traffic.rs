//! Traffic of the denoiser: what its network does, and a condition that lies as the noisy fields.

use super::EdmPrecondSuperResolutionConfig;
use crate::traffic::{Split, Traffic};

/// The factors of the preconditioning are of each sample.
pub(super) fn of(config: &EdmPrecondSuperResolutionConfig, split: &Split) -> Option<Traffic> {
    Some(config.network.traffic(split)?.and(split.aligned().forward))
}
