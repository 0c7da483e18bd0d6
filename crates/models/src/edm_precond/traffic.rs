//! Traffic of a preconditioned SongUNet: that of the network, and the factors that scale each sample.

use super::EdmPrecondConfig;
use crate::traffic::{Split, Traffic, preconditioning};

/// The preconditioning scales each sample; conditions are sharded as the samples are.
pub(super) fn of(config: &EdmPrecondConfig, split: &Split) -> Option<Traffic> {
    Some(config.network.traffic(split)?.and(preconditioning(&config.sigma_data, split)))
}
