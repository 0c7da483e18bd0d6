//! Pix2Pix: convolutions down to a coarser grid, residual blocks, and transposed convolutions back.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::{Pix2PixConfig, Pix2PixPadding};
pub use model::Pix2Pix;

const MODEL: &str = "pix2pix";
