//! The fully connected network.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::FullyConnectedConfig;
pub use model::FullyConnected;

const MODEL: &str = "fully_connected";
