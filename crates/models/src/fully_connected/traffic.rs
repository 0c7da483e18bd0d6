//! Traffic of a fully connected network: nothing.

use super::FullyConnectedConfig;
use crate::traffic::{Split, Traffic};

/// Every layer is of each point.
pub(super) fn of(_config: &FullyConnectedConfig, split: &Split) -> Option<Traffic> {
    Some(split.aligned())
}
