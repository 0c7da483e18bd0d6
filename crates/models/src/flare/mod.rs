//! FLARE: points attend to each other by way of trained queries.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::FlareConfig;
pub use model::Flare;

const MODEL: &str = "flare";
