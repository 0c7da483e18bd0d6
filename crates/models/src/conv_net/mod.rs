//! The plain convolutional network.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::ConvNetConfig;
pub use model::ConvNet;

const MODEL: &str = "conv_net";
