//! Traffic of a preconditioned network: that of the network, and the factors that scale each sample.

use super::EdmPreconditionerConfig;
use crate::traffic::{Split, Traffic, preconditioning};

/// The preconditioning scales each sample; conditions are sharded as the samples are.
pub(super) fn of(config: &EdmPreconditionerConfig, split: &Split) -> Option<Traffic> {
    Some(config.model.0.traffic(split)?.and(preconditioning(&config.sigma_data, split)))
}
