//! Traffic of the denoiser: that of the network, and the factors of samples.

use super::EdmPrecondSuperResolutionConfig;
use crate::diffusion::SigmaData;
use crate::traffic::{Split, Traffic, preconditioning};

/// The preconditioning scales each sample; fields beside the samples are split as they are.
pub(super) fn of(config: &EdmPrecondSuperResolutionConfig, split: &Split) -> Option<Traffic> {
    Some(config.network.traffic(split)?.and(preconditioning(&SigmaData::All(config.sigma_data), split)))
}
