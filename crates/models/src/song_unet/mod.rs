//! SongUNet: the U-Nets of score-based diffusion models.

mod block;
mod config;
mod embedding;
mod layers;
mod levels;
mod model;
mod plan;
mod traffic;

pub use config::{DecoderType, EmbeddingType, EncoderType, SongUNetConfig};
pub(crate) use model::CLASS_LABELS;
pub use model::SongUNet;

const MODEL: &str = "song_unet";
