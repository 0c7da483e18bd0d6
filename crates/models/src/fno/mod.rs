//! The Fourier Neural Operator.

mod config;
mod model;
mod sharding;
mod traffic;

pub use crate::layers::PerDim;
use config::Sizes;
pub use config::{FnoConfig, PaddingType};
pub use model::Fno;

const MODEL: &str = "fno";
