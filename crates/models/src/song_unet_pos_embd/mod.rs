//! SongUNet with positions on the grid as further channels of its input.

mod config;
pub(crate) mod keys;
mod model;
mod patches;
mod positions;
mod traffic;

pub use config::{GridPositions, GridType, SongUNetPosEmbdConfig};
pub use model::SongUNetPosEmbd;

const MODEL: &str = "song_unet_pos_embd";
