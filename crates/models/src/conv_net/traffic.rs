//! Traffic of the plain convolutional network: halos.

use super::ConvNetConfig;
use crate::traffic::{Split, Traffic};

/// Bounds the halos: k − 1 rows for each convolution.
pub(super) fn of(config: &ConvNetConfig, split: &Split) -> Traffic {
    let grid = split.grid(config.dimension);
    let kernel = config.kernel_size as i64;
    let first = grid.convolved(config.in_channels as i64, kernel, 1);
    let others = config.depth as f64 * grid.convolved(config.hidden_channels as i64, kernel, 1);
    split.aligned().and(first + others)
}
