//! The super-resolution residual network.
//!
//! It depends on no rank, data set or training.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::{SrResNetConfig, SrResNetPadding};
pub use model::SrResNet;

const MODEL: &str = "sr_res_net";
/// Number of spatial dims.
const SPATIAL: usize = 3;
/// Hint of errors about even kernels.
const TAKES_EVEN: &str = "--set model.padding=same takes even ones";
