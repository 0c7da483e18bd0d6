//! DhariwalUNet: the U-Net of ADM.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;

pub use config::DhariwalUNetConfig;
pub use model::DhariwalUNet;

use crate::song_unet::Style;

const MODEL: &str = Style::Adm.model();
