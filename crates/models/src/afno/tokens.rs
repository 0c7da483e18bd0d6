//! Common parts of AFNO and ModAFNO: patch embedding, blocks, and head.

use isobar_array::Array;
use isobar_nn::{Dropout, Linear, LinearOptions, Mode, PatchEmbed, PositionEmbedding};
use isobar_shard::{Init, Params};

use super::BATCH_DIM;
use super::block::{Block, BlockConfig, Modulated};
use super::filter::{self, FilterConfig, ModeWindow};
use crate::error::{Checker, Error, Result};
use crate::layers::Recompute;

/// The arguments by PhysicsNeMo's names.
#[derive(Debug)]
pub(crate) struct TokensConfig {
    pub(crate) model: &'static str,
    pub(crate) inp_shape: [usize; 2],
    pub(crate) in_channels: usize,
    pub(crate) out_channels: usize,
    pub(crate) patch_size: [usize; 2],
    pub(crate) embed_dim: usize,
    pub(crate) depth: usize,
    pub(crate) mlp_ratio: f64,
    pub(crate) drop_rate: f64,
    pub(crate) num_blocks: usize,
    pub(crate) sparsity_threshold: f64,
    pub(crate) hard_thresholding_fraction: f64,
    pub(crate) gradient_checkpointing: bool,
    pub(crate) modulation: Modulated,
}

#[derive(Debug)]
pub(crate) struct Tokens<A> {
    model: &'static str,
    fields: [i64; 2],
    patch: [i64; 2],
    channels: [i64; 2],
    dropout: Dropout,
    pos_embed: PositionEmbedding<A>,
    patch_embed: PatchEmbed<A>,
    blocks: Vec<Recompute<Block<A>>>,
    head: Linear<A>,
}

/// A modulation of each sample.
#[derive(Debug)]
pub(crate) struct Modulation<A> {
    /// Offset added to all tokens, `[batch, features]`.
    pub(crate) offset: A,
    /// Modulation vector of the blocks, `[batch, mod_dim]`.
    pub(crate) vector: A,
}

impl<A: Array> Tokens<A> {
    /// Checks the arguments, then takes the parameters from `params`; `window` says which modes pass on a grid.
    pub(crate) fn new(
        config: &TokensConfig,
        window: impl Fn([i64; 2]) -> ModeWindow,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let check = Checker(config.model);
        let mut fields = [0; 2];
        let mut patch = [0; 2];
        for (dim, name) in ["height", "width"].into_iter().enumerate() {
            fields[dim] = check.extent(&format!("{name} of inp_shape"), config.inp_shape[dim])?;
            patch[dim] = check.extent(&format!("{name} of patch_size"), config.patch_size[dim])?;
            check.divisible(
                (&format!("{name} of inp_shape"), fields[dim]),
                ("that of patch_size", patch[dim]),
            )?;
        }
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.out_channels)?;
        let width = check.extent("embed_dim", config.embed_dim)?;
        let groups = check.extent("num_blocks", config.num_blocks)?;
        check.divisible(("embed_dim", width), ("num_blocks", groups))?;
        check.probability("drop_rate", config.drop_rate)?;
        let hidden = (width as f64 * config.mlp_ratio) as i64;
        check.ensure((1..=i64::from(i32::MAX)).contains(&hidden), || {
            format!("mlp_ratio {} leaves no hidden layer of a possible width", config.mlp_ratio)
        })?;
        filter::check(&check, config.sparsity_threshold, config.hard_thresholding_fraction)?;

        let grid = [fields[0] / patch[0], fields[1] / patch[1]];
        let area = patch[0] * patch[1];
        let pos_embed = PositionEmbedding::new("pos_embed", grid[0] * grid[1], width, params)?;
        let patch_embed = PatchEmbed::new(patch, inputs, width, &mut params.scope("patch_embed"))?;
        let block = || {
            let lambda = config.sparsity_threshold;
            let filter = FilterConfig { grid, window: window(grid), width, groups, lambda };
            BlockConfig { filter, hidden, drop_rate: config.drop_rate, modulation: config.modulation }
        };
        let blocks = (0..config.depth)
            .map(|i| {
                let name = format!("blocks.{i}");
                let block = Block::new(block(), &mut params.scope(&name))?;
                Ok(Recompute::new(&name, block, config.gradient_checkpointing))
            })
            .collect::<Result<_>>()?;
        let small = Some(Init::TruncNormal { std: 0.02 });
        let options = LinearOptions { bias: false, weight_init: small, ..LinearOptions::default() };
        let patch_size = outputs.saturating_mul(area);
        let head = Linear::with_options(width, patch_size, options, &mut params.scope("head"))?;
        let (model, channels) = (config.model, [inputs, outputs]);
        let dropout = Dropout::new(config.drop_rate)?;
        Ok(Self { model, fields, patch, channels, dropout, pos_embed, patch_embed, blocks, head })
    }

    /// The fields `[batch, out_channels, height, width]` for `x` `[batch, in_channels, height, width]`.
    pub(crate) fn forward(&self, x: &A, modulation: Option<&Modulation<A>>, mode: Mode<'_>) -> Result<A> {
        let [height, width] = self.fields;
        let [inputs, outputs] = self.channels;
        let [p0, p1] = self.patch;
        let [h, w] = [height / p0, width / p1];
        let shape = x.shape();
        if shape.len() != 4 || shape[1..] != [inputs, height, width] {
            let want = format!("[batch, {inputs}, {height}, {width}]");
            return Err(Error::Input { model: self.model, got: shape, want });
        }
        let batch = shape[0];

        // Tokens stand as [h, w, batch, features]: so the transforms over h and w and the products over features are plain
        // matrix products on the memory as it lies.
        let mut tokens = self.pos_embed.forward_grid(&self.patch_embed.forward_grid(x)?)?;
        tokens = self.dropout.forward_parts(&tokens, mode, BATCH_DIM, &[])?;
        if let Some(modulation) = modulation {
            tokens = tokens.add(&modulation.offset)?;
        }
        for block in &self.blocks {
            let inputs: Vec<&A> = [&tokens].into_iter().chain(modulation.map(|of| &of.vector)).collect();
            tokens = block.forward(&inputs, mode, |block, inputs, mode| {
                block.forward(&inputs[0], inputs.get(1), mode)
            })?;
        }
        let patches = self.head.forward(&tokens)?.reshape(&[h, w, batch, p0, p1, outputs])?;
        Ok(patches.permute(&[2, 5, 0, 3, 1, 4])?.reshape(&[batch, outputs, height, width])?)
    }
}
