//! SongUNet with positions and trained fields of the lead time as further channels of its input.
//!
//! It depends on no rank, data set or training.

mod config;
mod model;
mod traffic;

pub use config::{LeadTimes, SongUNetPosLtEmbdConfig};
pub(crate) use model::LEAD_TIME_LABEL;
pub use model::SongUNetPosLtEmbd;

const MODEL: &str = "song_unet_pos_lt_embd";
