//! DLWP: a U-Net on the cubed sphere, with one set of weights for the equator and one for the poles.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::DlwpConfig;
pub use model::Dlwp;

const MODEL: &str = "dlwp";
