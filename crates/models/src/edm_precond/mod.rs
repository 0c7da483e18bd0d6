//! The denoiser of diffusion models around SongUNet, with conditions on the grid.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod network;
mod traffic;

pub use config::EdmPrecondConfig;
pub use model::EdmPrecond;
pub(crate) use model::network_input;
pub use network::{PrecondNetwork, SongNetwork};

const MODEL: &str = "edm_precond";
