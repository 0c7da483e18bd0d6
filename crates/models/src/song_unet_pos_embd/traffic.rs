//! Traffic of SongUNet with positions: what the network does, and trained positions.

use super::SongUNetPosEmbdConfig;
use crate::model::Architecture;
use crate::traffic::{Split, Traffic};

/// Functions of positions are computed where they are used. Trained ones come to the shards of the fields, if they lie otherwise; in
/// backward the gradients of the samples' copies of them are gathered.
pub(super) fn of(config: &SongUNetPosEmbdConfig, split: &Split) -> Option<Traffic> {
    let fields = split.grid(2).moved() + split.points() / (1.0 + Traffic::BACKWARD);
    Some(config.network.traffic(split)?.and(config.positions.trained() as f64 * fields))
}
