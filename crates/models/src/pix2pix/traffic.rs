//! Traffic of Pix2Pix: halos.

use super::Pix2PixConfig;
use crate::traffic::{Grid, Split, Traffic};

/// The first and the last convolution receive 6 rows, strided and transposed ones and those of residual blocks 2; batch norms
/// their sums.
pub(super) fn of(config: &Pix2PixConfig, split: &Split) -> Option<Traffic> {
    let fields = split.grid(config.dimension);
    let (width, downs) = (config.conv_layer_size as i64, config.n_downsampling);
    let norm = |grid: &Grid, channels: i64| match config.batch_norm {
        true => grid.batch_summed(4 * channels),
        false => 0.0,
    };
    // On small grids, several ranks need the same rows.
    let wide =
        |grid: &Grid, channels: i64| grid.spans(&vec![7; config.dimension]) * grid.convolved(channels, 7, 1);
    let mut elements = wide(&fields, config.in_channels as i64) + norm(&fields, width);
    for level in 0..downs {
        let (grid, channels) = (fields.coarser(1 << level), width << level);
        elements += grid.convolved(channels, 3, 2) + norm(&grid, 2 * channels);
        elements += grid.coarser(2).convolved(2 * channels, 3, 2) + norm(&grid, channels);
    }
    let (coarsest, widest) = (fields.coarser(1 << downs), width << downs);
    let blocks = 2.0 * config.n_blocks as f64;
    elements += blocks * (coarsest.convolved(widest, 3, 1) + norm(&coarsest, widest));
    let mut grid = fields;
    for _ in 0..config.further() {
        elements += grid.convolved(width, 3, 2) + norm(&grid, width);
        grid = grid.finer(2);
    }
    Some(split.aligned().and(elements + wide(&grid, width)))
}
