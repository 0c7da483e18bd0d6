//! The U-Net.
//!
//! It depends on no rank, data set or training.

mod config;
mod grid;
mod layers;
mod model;
mod traffic;

pub use config::{Normalization, NormalizationArgs, PaddingMode, Pooling, UNetConfig, Upsampling};
pub use grid::{UNetPadding, UNetPaddingKeyword};
pub use model::UNet;

const MODEL: &str = "unet";
