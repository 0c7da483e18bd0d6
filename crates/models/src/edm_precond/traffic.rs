//! Traffic of a preconditioned SongUNet: what the network does, and fields that lie as the noisy ones.

use super::EdmPrecondConfig;
use crate::traffic::{Split, Traffic};

/// The factors of the preconditioning are of each sample.
pub(super) fn of(config: &EdmPrecondConfig, split: &Split) -> Option<Traffic> {
    let network = config.network.traffic(split)?;
    Some(network.and(split.aligned().forward))
}
