//! Pangu-Weather: a transformer of shifted windows over levels, latitudes and longitudes.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::PanguConfig;
pub use model::Pangu;

const MODEL: &str = "pangu";
