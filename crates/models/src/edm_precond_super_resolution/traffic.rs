//! Traffic of the denoiser: that of the network, and the factors that scale each sample.

use super::EdmPrecondSuperResolutionConfig;
use crate::diffusion::SigmaData;
use crate::traffic::{Split, Traffic, preconditioning};

/// The preconditioning scales each sample; conditions are sharded as the samples are.
pub(super) fn of(config: &EdmPrecondSuperResolutionConfig, split: &Split) -> Option<Traffic> {
    Some(config.network.traffic(split)?.and(preconditioning(&SigmaData::All(config.sigma_data), split)))
}
