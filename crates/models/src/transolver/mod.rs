//! Transolver: points attend to each other by way of few slices.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::TransolverConfig;
pub use model::Transolver;

const MODEL: &str = "transolver";
