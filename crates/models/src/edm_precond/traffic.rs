//! Traffic of a preconditioned SongUNet: that of the network, and the factors of samples.

use super::EdmPrecondConfig;
use crate::traffic::{Split, Traffic, preconditioning};

/// The preconditioning scales each sample; fields beside the samples are split as they are.
pub(super) fn of(config: &EdmPrecondConfig, split: &Split) -> Option<Traffic> {
    Some(config.network.traffic(split)?.and(preconditioning(&config.sigma_data, split)))
}
