//! SongUNet: the U-Nets of score-based diffusion models.
//!
//! It depends on no rank, data set or training.

mod block;
mod config;
mod embedding;
mod layers;
mod levels;
mod model;
mod plan;
mod traffic;

pub use config::{DecoderType, EmbeddingType, EncoderType, SongUNetConfig};
pub use model::SongUNet;
pub(crate) use model::{AUGMENT_LABELS, CLASS_LABELS, NOISE_LABELS};
pub(crate) use plan::Style;
pub(crate) use traffic::of as traffic;

const MODEL: &str = "song_unet";
