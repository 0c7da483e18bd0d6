//! Traffic of blocks of windows.

use super::{StageOptions, Windows};
use crate::traffic::Grid;

/// Elements that blocks of windows of `width` features receive on the rows and columns of `grid`: at the start of a stage, the points
/// by which shards differ from whole windows, of two arrays, and at its end the way back; in every second block the points of the
/// shift, there and back. Where a window reaches over several shards, its points come from, and their gradients go to, each of them.
/// Along a dim with a single window, ranks get all points at the start, and nothing afterwards.
pub(crate) fn window_traffic(windows: &Windows, width: i64, blocks: usize, grid: &Grid) -> f64 {
    let ([levels, rows, columns], [_, ny, nx]) = (windows.padded(), windows.counts());
    let (grid, gathered) = grid.on(&[rows, columns]).gathered_along(&[ny == 1, nx == 1]);
    let ([_, wy, wx], [_, sy, sx]) = (windows.window, windows.shift);
    let features = (levels * width) as f64;
    let shifted = grid.halo_each(&[2 * (sy + wy), 2 * (sx + wx)]);
    let moved = 2.0 * grid.halo_each(&[2 * wy, 2 * wx]) + blocks.div_ceil(2) as f64 * shifted;
    // However many shards a window reaches over, a rank receives each point of its windows at most once each time.
    let times = 2 + 2 * blocks.div_ceil(2);
    let moved = (grid.spans(&[wy, wx]) * moved).min(times as f64 * grid.with_windows(&[wy, wx]));
    features * (gathered + moved)
}

impl StageOptions<'_> {
    /// Elements that `blocks` blocks of the stage receive; see [`window_traffic`].
    pub(crate) fn traffic(&self, blocks: usize, grid: &Grid) -> f64 {
        let windows = Windows { grid: self.grid, window: self.window, shift: self.shift };
        window_traffic(&windows, self.width, blocks, grid)
    }

    /// Elements that a resampling and a patch embedding or recovery at the ends of the stage receive.
    pub(crate) fn ends(&self, grid: &Grid) -> f64 {
        let [levels, rows, columns] = self.grid;
        (4 * levels * self.width) as f64 * grid.on(&[rows, columns]).halo(4)
    }
}
