//! Traffic of SongUNet with lead times: what the network does, trained positions, and fields of the samples' lead times.

use super::SongUNetPosLtEmbdConfig;
use crate::model::Architecture;
use crate::traffic::{Split, Traffic};

/// Trained fields come to the shards of the fields, if they lie otherwise: all lead times of them, before the samples' are picked.
/// In backward the gradients of the samples' copies of trained positions are gathered.
pub(super) fn of(config: &SongUNetPosLtEmbdConfig, split: &Split) -> Option<Traffic> {
    let lead = &config.lead_times;
    let channels = config.positions.trained() + (lead.lead_time_steps + 1) * lead.lead_time_channels;
    let copies = config.positions.trained() as f64 * split.points() / (1.0 + Traffic::BACKWARD);
    Some(config.network.traffic(split)?.and(channels as f64 * split.grid(2).moved() + copies))
}
