//! Aurora: a perceiver over pressure levels, and a U-Net of shifted windows over levels, latitudes and longitudes.
//!
//! It depends on no rank, data set or training.

mod backbone;
mod config;
mod decoder;
mod encoder;
mod expansion;
mod geometry;
mod model;
mod perceiver;
mod stage;
mod traffic;

pub use config::AuroraConfig;
pub use model::Aurora;

const MODEL: &str = "aurora";
