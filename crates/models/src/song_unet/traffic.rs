//! Traffic of a SongUNet: halos, sums of group norms, keys and values.

use super::plan::{Plan, Style, groups};
use super::{DecoderType, EncoderType, SongUNetConfig};
use crate::traffic::{Grid, Split, Traffic};

/// Each block has two convolutions of 3 × 3 and two group norms, the first block of a level also the resampling filter on both
/// paths. A level that attends receives keys and values of all its points, or each rank's share of queries, keys, values and results,
/// and moves the result back to its own points. The embedding of each sample, as a shift or also a scale of the channels of each block,
/// is redistributed to the layout of the samples.
pub(crate) fn of(config: &SongUNetConfig, style: Style, split: &Split) -> Option<Traffic> {
    let plan = Plan::new(config, style).ok()?;
    let fields = split.grid(2);
    let taps = plan.filter.len() as i64;
    let vectors = if style == Style::Adm { 2.0 } else { 1.0 };
    let block = |grid: &Grid, inputs: i64, outputs: i64| -> Option<f64> {
        let sums = grid.summed(4 * (groups(inputs, style).ok()? + groups(outputs, style).ok()?));
        let modulation = vectors * outputs as f64 * split.samples();
        Some(grid.convolved(inputs + outputs, 3, 1) + sums + modulation)
    };
    let (blocks, last) = (config.num_blocks as i64, plan.widths.len() - 1);
    let mut elements = fields.convolved(plan.inputs, 3, 1);
    let mut before = plan.first();
    for (level, &width) in plan.widths.iter().enumerate() {
        let grid = fields.coarser(1 << level);
        let above = *plan.widths.get(level + 1).unwrap_or(&width);
        let wide = width.max(before).max(above);
        // Down, up with the skip connections, and the two entries.
        elements += (blocks - 1).max(0) as f64 * block(&grid, width, width)? + block(&grid, before, width)?;
        elements += (blocks + 1) as f64 * block(&grid, wide, width)?;
        elements += (blocks + 1) as f64 * grid.convolved(wide, 3, 1);
        elements += 2.0 * block(&grid, wide, wide)?;
        // Resampling: two paths and what passes the level by, on the finer grid.
        let finer = fields.coarser(1 << level.saturating_sub(1));
        let past = i64::from(config.encoder_type != EncoderType::Standard);
        elements += finer.halo(taps + 2) * (2 * before + 2 * wide + past * 3 * wide) as f64;
        if config.decoder_type == DecoderType::Skip {
            elements += grid.convolved(width + 2 * plan.outputs, 3 + taps, 1);
        }
        let neck = i64::from(config.bottleneck_attention && level == last);
        // ADM's blocks on the way up have attention, too.
        let up = if style == Style::Adm { blocks + 1 } else { 1 };
        let attentions = neck + if plan.attends(config, level) { blocks + up } else { 0 };
        elements += (attentions * width) as f64 * (2.0 * grid.all_gathered() + 2.0 * grid.moved());
        before = width;
    }
    elements += fields.convolved(plan.first().max(plan.width), 3, 1);
    Some(split.aligned().and(elements))
}
