//! Traffic of a U-Net: halos.

use super::{Normalization, UNetConfig};
use crate::traffic::{Split, Traffic};

/// A convolution receives k − 1 rows of its input, and those that its stride moves across a shard boundary. A pooling or upsampling
/// receives the rows by which rounding moves a boundary, a group norm its sums, and a gate also the rows of the upsampled signal.
pub(super) fn of(config: &UNetConfig, split: &Split) -> Option<Traffic> {
    let plan = config.plan().ok()?;
    let fields = split.grid(plan.spatial);
    let kernel = *plan.grid.kernel.iter().max()?;
    let strides = plan.grid.coarsening();
    let rows = plan.pool.saturating_mul(strides).saturating_mul(2);
    let norm = i64::from(config.normalization != Normalization::None) * 4;
    let (mut elements, mut before) = (0.0, plan.inputs);
    for (level, channels) in plan.levels.iter().enumerate() {
        let grid = fields.coarser(plan.pool.checked_pow(level as u32)?);
        let last = *channels.last()?;
        let mut down = before;
        for &next in channels {
            // On the way down, and on the way up beside the skip connection.
            elements += grid.convolved(down + 2 * next, kernel, strides);
            elements += 2.0
                * match config.normalization {
                    Normalization::BatchNorm => grid.batch_summed(norm * next),
                    _ => grid.summed(norm * next),
                };
            down = next;
        }
        let gate = if config.use_attn_gate { 3 } else { 1 };
        let below = plan.levels.get(level + 1).and_then(|below| below.last()).copied().unwrap_or(0);
        // Pooling; the upsampled features, and their halo.
        elements += grid.halo(rows) * ((1 + gate) * last + 2 * below) as f64;
        before = last;
    }
    if strides > 1 {
        // The features of the first level, on the points of the input.
        elements += fields.halo(rows) * (2 * plan.levels.first()?.last()?) as f64;
    }
    Some(split.aligned().and(elements + fields.convolved(before, kernel, 1)))
}
