//! Traffic of CNextU-net: halos.

use super::CNextUNetConfig;
use crate::traffic::{Split, Traffic};

/// Each block receives 6 rows for its depthwise convolution of 7, the projections at both ends 2, and resamplings the rows by which
/// boundaries are rounded, as do the features beside a skip connection.
pub(super) fn of(config: &CNextUNetConfig, split: &Split) -> Option<Traffic> {
    let fields = split.grid(config.n_spatial_dims);
    let width = config.init_features as i64;
    let mut elements = fields.convolved(config.dim_in as i64 + width, 3, 1);
    for stage in 0..=config.stages {
        let (grid, channels) = (fields.coarser(1 << stage), width << stage);
        let blocks =
            if stage == config.stages { config.blocks_at_neck } else { config.blocks_per_stage } as i64;
        // Down with the channels of the stage, up with twice as many.
        let both = if stage == config.stages { blocks } else { 3 * blocks };
        elements += grid.convolved(both * channels, 7, 1) + grid.halo(2) * (4 * channels) as f64;
    }
    Some(split.aligned().and(elements))
}
