//! The Fourier Neural Operator.

mod config;
mod model;
mod sharding;
mod spectral;
mod weight;

pub use crate::layers::PerDim;
pub use config::{Factorization, FnoConfig, PaddingType};
pub use model::Fno;

const MODEL: &str = "fno";
