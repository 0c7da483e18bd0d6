//! The Fourier Neural Operator.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod sharding;
mod traffic;

pub use crate::layers::PerDim;
use config::Sizes;
pub use config::{FnoConfig, PaddingType};
pub use model::Fno;

const MODEL: &str = "fno";
