//! FLARE: points attend to each other by way of trained queries.

mod config;
mod model;
mod traffic;

pub use config::FlareConfig;
pub use model::Flare;

const MODEL: &str = "flare";
