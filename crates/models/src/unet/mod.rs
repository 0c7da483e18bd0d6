//! The U-Net.

mod config;
mod layers;
mod model;

pub use config::{Normalization, NormalizationArgs, PaddingMode, Pooling, UNetConfig, Upsampling};
pub use model::UNet;

const MODEL: &str = "unet";
