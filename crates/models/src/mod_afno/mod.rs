//! The Adaptive Fourier Neural Operator, modulated by a number for each sample.
//!
//! It depends on no rank, data set or training.

mod config;
mod embed;
mod model;
mod sharding;
mod traffic;

pub use crate::afno::ScaleShiftMode;
pub use config::ModAfnoConfig;
pub use embed::{EmbedMethod, ModEmbedConfig};
pub use model::ModAfno;

const MODEL: &str = "mod_afno";
