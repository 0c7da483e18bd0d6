//! Traffic of SongUNet with positions: what the network does, and trained positions.

use super::SongUNetPosEmbdConfig;
use crate::model::Architecture;
use crate::traffic::{Split, Traffic};

/// Functions of positions are computed where they are used. Trained ones come to the shards of the fields, if they lie otherwise.
pub(super) fn of(config: &SongUNetPosEmbdConfig, split: &Split) -> Option<Traffic> {
    let trained = config.positions.trained() as f64 * split.grid(2).moved();
    Some(config.network.traffic(split)?.and(trained))
}
