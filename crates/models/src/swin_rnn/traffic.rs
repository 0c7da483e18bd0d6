//! Traffic of SwinRNN: shifts of windows, and halos.

use super::SwinRnnConfig;
use super::model::{BLOCKS, Geometry, HALVINGS};
use crate::traffic::{Split, Traffic};
use crate::windows::window_traffic;

/// On each of 4 grids 2 blocks of the encoder and 12 of the decoder, see [`window_traffic`]. Between grids, blocks of 3 convolutions
/// and 2 group norms.
pub(super) fn of(config: &SwinRnnConfig, split: &Split) -> Option<Traffic> {
    let geometry = Geometry::new(config).ok()?;
    let (fields, width) = (split.grid(2), geometry.swin.width);
    let mut elements = 0.0;
    for level in 0..=HALVINGS {
        let grid = fields.coarser(1 << level);
        let windows = geometry.at(level).windows(true);
        elements += BLOCKS.map(|blocks| window_traffic(&windows, width, blocks, &grid)).iter().sum::<f64>();
        // Down and up, of features and states; what is joined.
        let sums = grid.summed(16 * (width + geometry.channels));
        elements += grid.convolved(12 * width + 6 * geometry.channels, 3, 1) + sums;
    }
    Some(split.aligned().and(elements + fields.convolved(2 * width + 4 * geometry.channels, 3, 1)))
}
