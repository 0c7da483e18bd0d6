//! The plain convolutional network.

mod config;
mod model;
mod traffic;

pub use config::ConvNetConfig;
pub use model::ConvNet;

const MODEL: &str = "conv_net";
