//! The Adaptive Fourier Neural Operator.

pub(crate) mod block;
pub(crate) mod filter;
mod scale_shift;
pub(crate) mod tokens;

use isobar_shard::{Array, Params};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::Result;
use crate::mode::Mode;
use filter::{ModeWindow, kept_modes};
pub use scale_shift::ScaleShiftMode;
use tokens::{Tokens, TokensConfig};

const MODEL: &str = "afno";
/// The dim of the batch between the tokens and the features.
const BATCH_DIM: usize = 2;

/// Arguments of [`Afno`], by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AfnoConfig {
    /// Height and width of the fields.
    pub inp_shape: [usize; 2],
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Height and width of the patches that become tokens; they divide `inp_shape`.
    #[serde(default = "patch_size")]
    pub patch_size: [usize; 2],
    /// Features of a token.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Number of blocks.
    #[serde(default = "depth")]
    pub depth: usize,
    /// Width of the hidden layer between the mixings, in multiples of `embed_dim`.
    #[serde(default = "mlp_ratio")]
    pub mlp_ratio: f64,
    /// Probability of dropout, after the embedding and inside the layers between the mixings.
    #[serde(default)]
    pub drop_rate: f64,
    /// Number of independent groups of features in the spectral weights; it divides `embed_dim`.
    #[serde(default = "num_blocks")]
    pub num_blocks: usize,
    /// Spectral coefficients are moved towards 0 by this much.
    #[serde(default = "sparsity_threshold")]
    pub sparsity_threshold: f64,
    /// Fraction of the modes that is kept, of `height / 2 + 1` of the token grid.
    #[serde(default = "hard_thresholding_fraction")]
    pub hard_thresholding_fraction: f64,
    /// Keep the rows of the lowest frequencies, and limit columns by the width; weights that PhysicsNeMo trained need it off.
    #[serde(default)]
    pub corrected_modes: bool,
    /// Keep nothing of the blocks' insides for backward, which computes them again: less memory, about a third more time. The numbers do
    /// not depend on it.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl AfnoConfig {
    /// The defaults for fields of `inp_shape` with the given channels.
    pub fn new(inp_shape: [usize; 2], in_channels: usize, out_channels: usize) -> Self {
        Self {
            inp_shape,
            in_channels,
            out_channels,
            patch_size: patch_size(),
            embed_dim: embed_dim(),
            depth: depth(),
            mlp_ratio: mlp_ratio(),
            drop_rate: 0.0,
            num_blocks: num_blocks(),
            sparsity_threshold: sparsity_threshold(),
            hard_thresholding_fraction: hard_thresholding_fraction(),
            corrected_modes: false,
            gradient_checkpointing: false,
        }
    }
}

fn patch_size() -> [usize; 2] {
    [16, 16]
}

fn embed_dim() -> usize {
    256
}

fn depth() -> usize {
    4
}

fn mlp_ratio() -> f64 {
    4.0
}

fn num_blocks() -> usize {
    16
}

fn sparsity_threshold() -> f64 {
    0.01
}

fn hard_thresholding_fraction() -> f64 {
    1.0
}

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
/// spectral part computes in single precision for half kinds.
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
