//! SongUNet with positions on the grid as further channels of its input.
//!
//! It depends on no rank, data set or training.

mod config;
pub(crate) mod keys;
mod model;
mod patches;
mod positions;
mod traffic;

pub use config::{GridPositions, GridType, SongUNetPosEmbdConfig};
pub(crate) use config::{check_fields, check_inputs};
pub use model::SongUNetPosEmbd;
pub(crate) use model::check_channels;
pub(crate) use patches::{GLOBAL_INDEX, Patches};
pub(crate) use positions::Positions;

const MODEL: &str = "song_unet_pos_embd";
