//! Traffic of SongUNet with lead times: what the network does, trained positions, and fields of the samples' lead times.

use super::SongUNetPosLtEmbdConfig;
use crate::model::Architecture;
use crate::traffic::{Split, Traffic};

/// Trained fields of all lead times are redistributed to the layout of the fields where it differs, before those of the samples are
/// picked. Backward gathers the gradient of each sample's copy of trained positions.
pub(super) fn of(config: &SongUNetPosLtEmbdConfig, split: &Split) -> Option<Traffic> {
    let lead = &config.lead_times;
    let channels = config.positions.trained() + (lead.lead_time_steps + 1) * lead.lead_time_channels;
    let copies = config.positions.trained() as f64 * split.points() / (1.0 + Traffic::BACKWARD);
    Some(config.network.traffic(split)?.and(channels as f64 * split.grid(2).moved() + copies))
}
