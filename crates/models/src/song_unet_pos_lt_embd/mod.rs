//! SongUNet with positions and trained fields of the lead time as further channels of its input.

mod config;
mod model;
mod traffic;

pub use config::{LeadTimes, SongUNetPosLtEmbdConfig};
pub use model::SongUNetPosLtEmbd;

const MODEL: &str = "song_unet_pos_lt_embd";
