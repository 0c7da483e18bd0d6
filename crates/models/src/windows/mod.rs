//! Transformers of windows: grids `[batch, levels, rows, columns, features]` whose points attend to those of their window.
//!
//! Fields that are split over ranks are cut at multiples of the windows, once for each stage. A block then receives the points by
//! which its windows are shifted, and no others.

mod attention;
mod earth;
mod grid;
mod patch;
mod resample;
mod traffic;

pub(crate) use attention::WindowAttention;
pub(crate) use earth::{EarthStage, StageOptions, drop_rates};
pub(crate) use grid::{Windows, centred, crop, pad, product};
pub(crate) use patch::{PatchEmbed, PatchRecovery, patches};
pub(crate) use resample::{Downsample, Upsample};
pub(crate) use traffic::window_traffic;

#[cfg(test)]
pub(crate) mod tests;
