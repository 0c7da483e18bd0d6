//! Pix2Pix: convolutions down to a coarser grid, residual blocks, and transposed convolutions back.
//!
//! It depends on no rank, data set or training.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::{Pix2PixConfig, Pix2PixPadding};
pub use model::Pix2Pix;

const MODEL: &str = "pix2pix";
