//! One block: attention among tokens, then a perceptron for each.

use isobar_array::{Array, Unary};
use isobar_nn::{Dropout, LayerNorm, Linear, Mode};
use isobar_shard::{Params, Scope};

use super::modulation::{Modulation, modulated};
use crate::error::Result;
use crate::layers::{Start, TokenAttention, TokenAttentionConfig, batch_dim};

/// Configuration of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockConfig {
    pub(super) attention: TokenAttentionConfig,
    /// Scope of the attention's parameters.
    pub(super) attention_scope: &'static str,
    pub(super) hidden: i64,
    pub(super) conditioned: bool,
    pub(super) dit_initialization: bool,
    pub(super) norm_eps: f64,
    pub(super) mlp_drop: f64,
    pub(super) final_mlp_dropout: bool,
    pub(super) drop_path: f64,
}

#[derive(Debug)]
pub(super) struct Block<A> {
    modulation: Modulation<A>,
    norm: LayerNorm<A>,
    attention: TokenAttention<A>,
    layers: [Linear<A>; 2],
    dropout: Dropout,
    final_dropout: bool,
    drop_path: f64,
}

impl<A: Array> Block<A> {
    pub(super) fn new(config: BlockConfig, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockConfig { attention, hidden, .. } = config;
        let (width, start) = (attention.width, attention.start);
        let attention = TokenAttention::new(attention, &mut params.scope(config.attention_scope))?;
        // A module for the dropout takes a number.
        let second = if config.mlp_drop > 0.0 { "linear.layers.3" } else { "linear.layers.2" };
        let layers = [
            Linear::with_options(width, hidden, start.options(), &mut params.scope("linear.layers.0"))?,
            Linear::with_options(hidden, width, start.options(), &mut params.scope(second))?,
        ];
        let start = if config.dit_initialization { Start::Zero } else { start };
        Ok(Self {
            modulation: Modulation::new((width, 6), config.conditioned, start, params)?,
            norm: LayerNorm::without_affine(&[width], config.norm_eps)?,
            attention,
            layers,
            dropout: Dropout::new(config.mlp_drop)?,
            final_dropout: config.final_mlp_dropout,
            drop_path: config.drop_path,
        })
    }

    /// Applies the block to tokens `[grid…, batch, features]`, with vectors `[batch, features]` and rotary angles.
    pub(super) fn forward(&self, x: &A, c: Option<&A>, angles: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let vectors = self.modulation.vectors(c)?;
        let [shift_a, scale_a, gate_a, shift_m, scale_m, gate_m] = &vectors[..] else {
            return Ok(x.shallow_clone());
        };
        let u = modulated(&self.norm, x, [shift_a, scale_a])?;
        let x = self.gated(x, gate_a, &self.attention.forward(&u, angles, mode)?, mode)?;
        let u = modulated(&self.norm, &x, [shift_m, scale_m])?;
        self.gated(&x, gate_m, &self.mlp(&u, mode)?, mode)
    }

    /// x + gate · branch, without the branch of samples that are dropped.
    fn gated(&self, x: &A, gate: &A, branch: &A, mode: Mode<'_>) -> Result<A> {
        Ok(x.add(&mode.drop_path(&branch.mul(gate)?, self.drop_path, batch_dim(x))?)?)
    }

    fn mlp(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let [first, second] = &self.layers;
        let hidden = first.forward(x)?.unary(Unary::GeluTanh)?;
        let hidden = self.dropout.forward_parts(&hidden, mode, batch_dim(x), &[])?;
        let y = second.forward(&hidden)?;
        match self.final_dropout {
            true => Ok(self.dropout.forward_parts(&y, mode, batch_dim(x), &[])?),
            false => Ok(y),
        }
    }
}
