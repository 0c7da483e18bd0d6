//! DhariwalUNet: the U-Net of ADM.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;

pub use config::DhariwalUNetConfig;
pub use model::DhariwalUNet;

const MODEL: &str = "dhariwal_unet";
