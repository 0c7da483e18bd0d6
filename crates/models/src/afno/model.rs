//! The Adaptive Fourier Neural Operator.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::filter::{ModeWindow, kept_modes};
use super::tokens::{Tokens, TokensConfig};
use super::{AfnoConfig, MODEL};
use crate::batch::Batch;
use crate::error::Result;
use crate::model::Model;

/// The Adaptive Fourier Neural Operator: Guibas et al., *Adaptive Fourier Neural Operators: Efficient Token Mixers for
/// Transformers*, arXiv:2111.13587, as PhysicsNeMo builds it.
///
/// Patches become tokens of D features, plus a trained position. Each block computes, with u = norm(x),
///
/// ```text
/// x ← x + u + F⁻¹ S_λ( W₂ relu(W₁ F u + b₁) + b₂ )        mixes tokens, mode by mode
/// x ← x + fc2(gelu(fc1(norm(x))))                         mixes features, token by token
/// ```
///
/// with F the unitary real Fourier transform over the token grid, W complex and block-diagonal, relu and the soft-shrink S_λ
/// on real and imaginary parts apart, and all modes outside a window set to 0. A linear head turns each token into a patch.
///
/// The window, for a grid of h × w tokens, T = h / 2 + 1 and K = ⌊T · `hard_thresholding_fraction`⌋: rows T − K to T + K,
/// columns 0 to K. So columns are limited by the *height*, and a fraction below 1 keeps the rows of the *highest*
/// frequencies; both are PhysicsNeMo's, and weights depend on them. With `corrected_modes` the window holds the rows 0 to K and
/// the last K − 1, which are their mirror images, and the columns 0 to ⌊(w / 2 + 1) · `hard_thresholding_fraction`⌋. The
/// spectral part computes in single precision for half dtypes.
///
/// State dict: `pos_embed`, `patch_embed.proj.{weight,bias}`, `blocks.{i}.{norm1,norm2,mlp.fc1,mlp.fc2}.{weight,bias}`,
/// `blocks.{i}.filter.{w1,b1,w2,b2}`, `head.weight`.
#[derive(Debug)]
pub struct Afno<A = Tensor>(Tokens<A>);

impl<A: Array> Afno<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// `inp_shape` is not divisible by `patch_size`, `embed_dim` not by `num_blocks`; a size is 0; `drop_rate` is outside
    /// [0, 1), `hard_thresholding_fraction` outside [0, 1], `sparsity_threshold` negative, `mlp_ratio` · `embed_dim` below 1;
    /// or `params` refuses a parameter.
    pub fn new(config: &AfnoConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
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
            modulation: Default::default(),
        };
        let window = |grid| match config.corrected_modes {
            true => ModeWindow::lowest(grid, config.hard_thresholding_fraction),
            false => ModeWindow::Block(kept_modes(grid, config.hard_thresholding_fraction)),
        };
        Ok(Self(Tokens::new(&tokens, window, params)?))
    }

    /// The fields `[batch, out_channels, height, width]` for `x` `[batch, in_channels, height, width]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.0.forward(x, None, mode)
    }
}

impl<A: Array> Model<A> for Afno<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}
