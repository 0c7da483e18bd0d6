//! The CNextU-net of The Well: a U-Net of ConvNeXt blocks.
//!
//! It depends on no rank, data set or training.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::CNextUNetConfig;
pub use model::CNextUNet;

const MODEL: &str = "cnext_unet";
