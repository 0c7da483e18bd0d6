//! The denoiser of super-resolution, whose condition is always there.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::EdmPrecondSuperResolutionConfig;
pub use model::EdmPrecondSuperResolution;

const MODEL: &str = "edm_precond_super_resolution";
