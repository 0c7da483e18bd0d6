//! Traffic of a diffusion transformer: keys and values, and the modulation of samples.

use super::{AttentionBackend, DitConfig};
use crate::traffic::{Grid, Split, Traffic, attention};

/// Each block attends to all tokens or to a window of them; see [`attention`]. The modulation of a block is 6 vectors a sample,
/// redistributed to the layout of the samples; convolutions of the head receive halos.
pub(super) fn of(config: &DitConfig, split: &Split) -> Option<Traffic> {
    let fields = config.input_size.list(2);
    let grid = split.grid(fields.len());
    let patch = config.patch_size.list(fields.len());
    let extents: Vec<i64> = fields.iter().zip(&patch).map(|(&n, &p)| (n / p.max(1)) as i64).collect();
    let tokens = grid.on(&extents);
    let width = config.hidden_size as i64;
    let block = attention(&tokens, width, kernel(config));
    let modulation = split.samples() * (6 * width) as f64;
    let outputs = config.outputs() as i64;
    let hidden = config.detokenizer_kwargs.conv_hidden.unwrap_or(64) as i64;
    let reach = config.detokenizer_kwargs.conv_kernel.unwrap_or(3) as i64;
    let head = grid.convolved(outputs + (config.conv_layers() as i64) * hidden, reach, 1);
    let cut = config.in_channels as f64 * patches(&grid, &patch);
    let ends = cut + (2 * width) as f64 * tokens.moved() + outputs as f64 * grid.moved();
    let depth = config.depth as f64 + 1.0;
    let masks = if config.use_nan_mask_tokens { mask(&grid, &tokens, &patch) } else { 0.0 };
    Some(split.aligned().and(depth * (block + modulation) + head + ends + masks))
}

/// Points of the mask of invalid points in patches that cross shards, and the mask of tokens, redistributed to their layout.
fn mask(grid: &Grid, tokens: &Grid, patch: &[usize]) -> f64 {
    patches(grid, patch) + tokens.moved()
}

/// Points of the patches that cross shards.
fn patches(grid: &Grid, patch: &[usize]) -> f64 {
    grid.halo_each(&patch.iter().map(|&extent| extent as i64).collect::<Vec<_>>())
}

/// Returns the largest extent of the attention windows, in tokens; `None` for global attention.
fn kernel(config: &DitConfig) -> Option<i64> {
    let given = config.attn_kwargs.attn_kernel.as_ref();
    match config.attention_backend {
        AttentionBackend::Timm | AttentionBackend::TransformerEngine => None,
        _ => Some(given.and_then(|kernel| kernel.list(1).into_iter().max()).unwrap_or(3) as i64),
    }
}
