//! Traffic of a preconditioned network: what the network does, and fields that lie as the noisy ones.

use super::EdmPreconditionerConfig;
use crate::traffic::{Split, Traffic};

/// The factors of the preconditioning are of each sample.
pub(super) fn of(config: &EdmPreconditionerConfig, split: &Split) -> Option<Traffic> {
    let network = config.model.0.traffic(split)?;
    Some(network.and(split.aligned().forward))
}
