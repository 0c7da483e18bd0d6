//! The denoiser of diffusion models around any network.

mod config;
mod model;
mod traffic;

pub use config::{EdmPreconditionerConfig, Network};
pub use model::EdmPreconditioner;

const MODEL: &str = "edm_preconditioner";
