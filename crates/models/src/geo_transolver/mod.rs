//! GeoTransolver: Transolver with attention to the geometry.
//!
//! It depends on no rank, data set or training.

mod config;
mod context;
mod local;
mod model;
mod options;
mod streams;
mod traffic;

pub use config::GeoTransolverConfig;
pub use model::GeoTransolver;
pub use options::{GeoAttention, StateMixing, Streams};

const MODEL: &str = "geo_transolver";
