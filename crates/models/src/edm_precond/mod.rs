//! The denoiser of diffusion models around SongUNet, with conditions on the grid.

mod config;
mod model;
mod traffic;

pub use config::{EdmPrecondConfig, PrecondNetwork};
pub use model::EdmPrecond;

const MODEL: &str = "edm_precond";
