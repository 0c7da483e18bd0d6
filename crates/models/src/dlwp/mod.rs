//! DLWP: a U-Net on the cubed sphere, with one set of weights for the equator and one for the poles.
//!
//! It depends on no rank, data set or training.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::DlwpConfig;
pub use model::Dlwp;

const MODEL: &str = "dlwp";
