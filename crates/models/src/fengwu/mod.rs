//! FengWu: transformers of shifted windows for each variable, and one over all variables between them.

mod config;
mod layers;
mod model;
mod traffic;

pub use config::FengwuConfig;
pub use model::Fengwu;

const MODEL: &str = "fengwu";
