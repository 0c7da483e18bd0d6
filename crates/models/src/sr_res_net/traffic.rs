//! Traffic of SRResNet: halos.

use super::SrResNetConfig;
use crate::traffic::{Split, Traffic};

/// Every convolution receives k − 1 rows, every batch norm its sums; points are shuffled within a rank.
pub(super) fn of(config: &SrResNetConfig, split: &Split) -> Option<Traffic> {
    let mut grid = split.grid(3);
    let (small, large) = (config.small_kernel_size as i64, config.large_kernel_size as i64);
    let width = config.conv_layer_size as i64;
    let layers = 2.0 * config.n_resid_blocks as f64 + 1.0;
    let mut elements = grid.convolved(config.in_channels as i64, large, 1);
    elements += layers * (grid.convolved(width, small, 1) + grid.batch_summed(4 * width));
    for _ in 0..config.scaling_factor.checked_ilog2()? {
        elements += grid.convolved(width, small, 1);
        grid = grid.finer(2);
    }
    Some(split.aligned().and(elements + grid.convolved(width, large, 1)))
}
