//! Traffic of SongUNet with positions: what the network does, and trained positions.

use super::SongUNetPosEmbdConfig;
use crate::model::Architecture;
use crate::traffic::{Split, Traffic};

/// Functions of positions are computed where they are used. Trained ones are redistributed to the layout of the fields
/// where it differs; backward gathers the gradient of each sample's copy.
pub(super) fn of(config: &SongUNetPosEmbdConfig, split: &Split) -> Option<Traffic> {
    let fields = split.grid(2).moved() + split.points() / (1.0 + Traffic::BACKWARD);
    Some(config.network.traffic(split)?.and(config.positions.trained() as f64 * fields))
}
