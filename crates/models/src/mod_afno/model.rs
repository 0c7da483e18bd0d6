//! The Adaptive Fourier Neural Operator, modulated by a number for each sample.

use isobar_array::Array;
use isobar_nn::{Linear, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::embed::Embedding;
use super::{MODEL, ModAfnoConfig};
use crate::afno::block::Modulated;
use crate::afno::filter::{ModeWindow, kept_modes, modes_around};
use crate::afno::tokens::{Modulation, Tokens, TokensConfig};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;

/// The modulated Adaptive Fourier Neural Operator: Leinonen et al., *Modulated Adaptive Fourier Neural Operators for Temporal
/// Interpolation of Weather Forecasts*, arXiv:2410.18904, as PhysicsNeMo builds it.
///
/// An [`Afno`](crate::Afno) that is given one more number for each sample, as a time between two states. With
/// τ = modulation / `max_time` embedded as a vector m (see [`EmbedMethod`](crate::EmbedMethod)), an offset W m + b is added to all tokens, and each
/// block computes, with u = norm(x) and scales and shifts that small networks make from m,
///
/// ```text
/// x ← x + u + F⁻¹ S_λ( W₂ relu(s₁ ⊙ (W₁ F u + b₁) + t₁) + b₂ )
/// x ← x + fc2(gelu(s₂ ⊙ fc1(norm(x)) + t₂))
/// ```
///
/// with (s − 1, t) = net₂ gelu(net₁ m). s₁ and t₁ are complex, as vectors (real parts, imaginary parts) of which 1 is taken
/// throughout: a network that gives 0 makes the factor 1 + i, as in PhysicsNeMo. With `scale_shift_mode` `real` they are real
/// numbers, for real and imaginary parts alike.
///
/// If filters are modulated, the window of modes is that of [`Afno`](crate::Afno) with T = min(h, w) / 2 + 1, so that on
/// grids higher than wide the last rows, of low frequencies, are removed.
///
/// State dict: that of [`Afno`](crate::Afno), `blocks.{i}.{filter,mlp}.scale_shift.net.layers.{0,2}.{weight,bias}`,
/// `mod_additive_proj.{weight,bias}`, `mod_embed_net.sinusoid_embed.freqs` or `mod_embed_net.onehot_embed.indices`,
/// `mod_embed_net.mlp.{2j}.{weight,bias}`.
#[derive(Debug)]
pub struct ModAfno<A = Tensor> {
    mod_dim: i64,
    tokens: Tokens<A>,
    offset: Linear<A>,
    /// None where nothing but the offset is modulated: the modulation is a vector then.
    embedding: Option<Embedding<A>>,
}

impl<A: Array> ModAfno<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Those of [`Afno::new`](crate::Afno::new); `embed_model.dim` is not `mod_dim`, or is odd with the sinusoidal method;
    /// `embed_model.max_time` is 0 or not finite.
    pub fn new(config: &ModAfnoConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let mod_dim = check.extent("mod_dim", config.mod_dim)?;
        let embedded = config.modulate_filter || config.modulate_mlp;
        if embedded {
            Embedding::<A>::check(&config.embed_model, mod_dim)?;
        }
        let tokens = TokensConfig {
            model: MODEL,
            inp_shape: config.inp_shape,
            in_channels: config.in_channels,
            out_channels: config.out_channels,
            patch_size: config.patch_size,
            embed_dim: config.embed_dim,
            depth: config.depth,
            mlp_ratio: config.mlp_ratio,
            drop_rate: config.drop_rate,
            num_blocks: config.num_blocks,
            sparsity_threshold: config.sparsity_threshold,
            hard_thresholding_fraction: config.hard_thresholding_fraction,
            gradient_checkpointing: config.gradient_checkpointing,
            modulation: Modulated {
                inputs: mod_dim,
                filter: config.modulate_filter.then_some(config.scale_shift_mode),
                mlp: config.modulate_mlp,
            },
        };
        let fraction = config.hard_thresholding_fraction;
        let window = |grid: [i64; 2]| {
            ModeWindow::Block(match config.modulate_filter {
                true => modes_around(grid, grid[0].min(grid[1]) / 2 + 1, fraction),
                false => kept_modes(grid, fraction),
            })
        };
        let tokens = Tokens::new(&tokens, window, params)?;
        let features = config.embed_dim as i64;
        let offset = Linear::new(mod_dim, features, &mut params.scope("mod_additive_proj"))?;
        let embedding = match embedded {
            true => Some(Embedding::new(&config.embed_model, &mut params.scope("mod_embed_net"))?),
            false => None,
        };
        Ok(Self { mod_dim, tokens, offset, embedding })
    }

    /// The fields `[batch, out_channels, height, width]` for `x` `[batch, in_channels, height, width]` and `modulation`
    /// `[batch, 1]` or `[batch]`; with both modulations off it is the vector itself, `[batch, mod_dim]`.
    ///
    /// # Errors
    ///
    /// `x` or `modulation` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, modulation: &A, mode: Mode<'_>) -> Result<A> {
        let (batch, got) = (x.shape().first().copied().unwrap_or(0), modulation.shape());
        let (features, fits) = match &self.embedding {
            Some(_) => (1, got == [batch] || got == [batch, 1]),
            None => (self.mod_dim, got == [batch, self.mod_dim]),
        };
        if !fits {
            return Err(Error::Input {
                model: MODEL,
                got,
                want: format!("[{batch}, {features}] for the modulation"),
            });
        }
        let vector = match &self.embedding {
            Some(embedding) => embedding.forward(&modulation.reshape(&[batch, 1])?)?,
            None => modulation.shallow_clone(),
        };
        let modulation = Modulation { offset: self.offset.forward(&vector)?, vector };
        self.tokens.forward(x, Some(&modulation), mode)
    }
}

impl<A: Array> Model<A> for ModAfno<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let time = batch.require(MODEL, Batch::<A>::TIME)?;
        Ok(Batch::of_fields(self.forward(x, time, mode)?))
    }
}
