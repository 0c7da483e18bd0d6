//! One block: attention among tokens, then a perceptron for each.

use isobar_array::Array;
use isobar_nn::{LayerNorm, Mlp, MlpOptions, Mode};
use isobar_shard::{Params, Scope};

use crate::error::Result;
use crate::layers::{TokenAttention, TokenAttentionConfig, batch_dim};

pub(super) const EPS: f64 = 1e-6;

/// Configuration of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockConfig {
    pub(super) attention: TokenAttentionConfig,
    pub(super) hidden: i64,
    pub(super) drop_rate: f64,
    pub(super) drop_path: f64,
}

#[derive(Debug)]
pub(super) struct Block<A> {
    norm1: LayerNorm<A>,
    attention: TokenAttention<A>,
    norm2: LayerNorm<A>,
    mlp: Mlp<A>,
    drop_path: f64,
}

impl<A: Array> Block<A> {
    pub(super) fn new(config: BlockConfig, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockConfig { attention, hidden, drop_rate, drop_path } = config;
        let width = attention.width;
        let options = MlpOptions { drop: drop_rate, init_std: Some(0.02), ..MlpOptions::default() };
        Ok(Self {
            norm1: LayerNorm::with_eps(&[width], EPS, &mut params.scope("norm1"))?,
            attention: TokenAttention::new(attention, &mut params.scope("attn"))?,
            norm2: LayerNorm::with_eps(&[width], EPS, &mut params.scope("norm2"))?,
            mlp: Mlp::new([width, hidden, width], options, &mut params.scope("mlp"))?,
            drop_path,
        })
    }

    /// Applies the block to tokens `[grid…, batch, features]`, with rotary angles.
    pub(super) fn forward(&self, x: &A, angles: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let branch = self.attention.forward(&self.norm1.forward(x)?, angles, mode)?;
        let x = x.add(&mode.drop_path(&branch, self.drop_path, batch_dim(x))?)?;
        let branch = self.mlp.forward_modulated(
            &self.norm2.forward(&x)?,
            mode,
            batch_dim(&x),
            Ok::<_, isobar_shard::Error>,
        )?;
        Ok(x.add(&mode.drop_path(&branch, self.drop_path, batch_dim(&x))?)?)
    }
}
