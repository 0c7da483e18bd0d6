//! A vision transformer on fields.
//!
//! It depends on no rank, data set or training.

mod block;
mod config;
mod model;
mod sharding;
mod traffic;

pub use config::{VitConfig, VitPositions};
pub use model::Vit;

const MODEL: &str = "vit";
