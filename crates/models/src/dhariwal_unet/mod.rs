//! DhariwalUNet: the U-Net of ADM.

mod config;
mod model;

pub use config::DhariwalUNetConfig;
pub use model::DhariwalUNet;

const MODEL: &str = "dhariwal_unet";
