//! Traffic of AFNO: spectral transposes.

use super::AfnoConfig;
use crate::traffic::{Split, Traffic};

/// Each block transforms its tokens and back: a rank receives at most as many complex numbers as its own tokens have to transform whole lines
/// or samples, and as many to bring them back. The fields at both ends may be cut otherwise than the patches are.
pub(super) fn of(config: &AfnoConfig, split: &Split) -> Option<Traffic> {
    let (width, depth) = (config.embed_dim, config.depth);
    let channels = [config.in_channels, config.out_channels];
    let tokens = tokens(config.inp_shape, config.patch_size, [width, depth], channels, split);
    // With split samples nothing moves but the gradients of the real form of complex weights and biases, in two layers of a block.
    let weights = (depth * 8 * width * (width / config.num_blocks.max(1) + 1)) as f64;
    Some(if split.grid(2).is_split() { tokens } else { tokens.and(split.parameter_sums(weights)) })
}

/// The traffic of any network of spectral blocks: extents of the fields and patches, width and number of blocks, channels of the
/// inputs and outputs. Rows of patches that cross shards move.
pub(crate) fn tokens(
    fields: [usize; 2],
    patch: [usize; 2],
    [width, depth]: [usize; 2],
    [inputs, outputs]: [usize; 2],
    split: &Split,
) -> Traffic {
    let grid = split.grid(2);
    let extents = [0, 1].map(|dim| (fields[dim] / patch[dim].max(1)) as i64);
    let tokens = grid.on(&extents);
    let blocks = (depth * width) as f64 * 4.0 * tokens.moved();
    let cut = inputs as f64 * grid.halo_each(&patch.map(|extent| extent as i64));
    let ends = width as f64 * tokens.moved() + outputs as f64 * grid.moved();
    split.aligned().and(blocks + cut + ends)
}
