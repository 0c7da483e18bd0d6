//! The denoiser of diffusion models around any network.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::{EdmPreconditionerConfig, Network};
pub use model::EdmPreconditioner;

const MODEL: &str = "edm_preconditioner";
