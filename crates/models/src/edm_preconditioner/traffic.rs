//! Traffic of a preconditioned network: that of the network, and the factors of samples.

use super::EdmPreconditionerConfig;
use crate::traffic::{Split, Traffic, preconditioning};

/// The preconditioning scales each sample; fields beside the samples are split as they are.
pub(super) fn of(config: &EdmPreconditionerConfig, split: &Split) -> Option<Traffic> {
    Some(config.model.0.traffic(split)?.and(preconditioning(&config.sigma_data, split)))
}
