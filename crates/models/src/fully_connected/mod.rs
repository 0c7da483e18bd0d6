//! The fully connected network.

mod config;
mod model;
mod traffic;

pub use config::FullyConnectedConfig;
pub use model::FullyConnected;

const MODEL: &str = "fully_connected";
