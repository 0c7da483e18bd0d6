//! SwinRNN: a pyramid of shifted-window transformers that steps a state on.
//!
//! It depends on no rank, data set or training.

mod config;
mod layers;
mod model;
mod stage;
mod traffic;

pub use config::SwinRnnConfig;
pub use model::SwinRnn;

const MODEL: &str = "swin_rnn";
