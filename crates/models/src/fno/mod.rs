//! The Fourier Neural Operator.

mod config;
mod model;
mod sharding;

pub use crate::layers::PerDim;
pub use config::{FnoConfig, PaddingType};
pub use model::Fno;

const MODEL: &str = "fno";
