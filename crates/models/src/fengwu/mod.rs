//! FengWu: transformers of shifted windows for each variable, and one over all variables between them.
//!
//! It depends on no rank, data set or training.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::FengwuConfig;
pub use model::Fengwu;

const MODEL: &str = "fengwu";
