//! Traffic of DLWP: strips around faces, and halos.

use super::DlwpConfig;
use crate::traffic::{Split, Traffic};

/// Each convolution receives the strips around the rank's own parts of faces, and the rows of the padded faces beside them.
/// With sharded faces or samples, the faces of the equator and of the poles are joined again after each convolution. The kernels of the
/// poles are used for two faces.
pub(super) fn of(config: &DlwpConfig, split: &Split) -> Option<Traffic> {
    let (fields, width) = (split.grid(2), config.nr_initial_channels as i64);
    let mut elements = 0.0;
    for level in 0..=config.depth {
        let (grid, channels) = (fields.coarser(1 << level), width << level);
        let inputs = if level == 0 { config.nr_input_channels as i64 } else { channels / 2 };
        // Two convolutions down and two up, or two in the middle; pooling and the finer grid's features beside.
        let padded = if level == config.depth { 3 * channels } else { inputs + 4 * channels };
        let joined = if level == config.depth { 3 * channels } else { 4 * channels };
        elements += padded as f64 * (grid.strips(1, 1) + grid.halo(2)) + joined as f64 * grid.regrouped();
        elements += grid.halo(4) * (3 * channels) as f64;
    }
    let ends = (config.nr_input_channels + config.nr_output_channels) as f64;
    Some(split.aligned().and(elements + ends * fields.regrouped()).uses(2))
}
