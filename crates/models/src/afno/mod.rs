//! The Adaptive Fourier Neural Operator.

mod block;
pub(crate) mod filter;

use isobar_shard::{Array, Init, Params, Placement};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::{Checker, Error, Result};
use crate::mode::Mode;
use block::Block;

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
/// frequencies; both are PhysicsNeMo's, and weights depend on them. The spectral part computes in single precision for
/// half kinds.
///
/// State dict: `pos_embed`, `patch_embed.proj.{weight,bias}`, `blocks.{i}.{norm1,norm2,mlp.fc1,mlp.fc2}.{weight,bias}`,
/// `blocks.{i}.filter.{w1,b1,w2,b2}`, `head.weight`.
#[derive(Debug)]
pub struct Afno<A = Tensor> {
    fields: [i64; 2],
    patch: [i64; 2],
    channels: [i64; 2],
    drop_rate: f64,
    pos_embed: A,
    proj_weight: A,
    proj_bias: A,
    blocks: Vec<Block<A>>,
    head: A,
}

impl<A: Array> Afno<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// `inp_shape` is not divisible by `patch_size`, `embed_dim` not by `num_blocks`; a size is 0; `drop_rate` is outside
    /// [0, 1), `hard_thresholding_fraction` outside [0, 1], `sparsity_threshold` negative, `mlp_ratio` · `embed_dim` below 1;
    /// or `params` refuses a parameter.
    pub fn new(config: &AfnoConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
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
        let whole = Placement::Replicate;
        let small = || Init::TruncNormal { std: 0.02 };
        let pos_embed = params.param("pos_embed", &[1, grid[0] * grid[1], width], small(), whole)?;
        let proj_shape = [width, inputs, patch[0], patch[1]];
        let fan = inputs * area;
        let proj_weight = params.param("patch_embed.proj.weight", &proj_shape, Init::FanIn(fan), whole)?;
        let proj_bias = params.param("patch_embed.proj.bias", &[width], Init::FanIn(fan), whole)?;
        let blocks = (0..config.depth)
            .map(|i| Block::new(config, grid, [width, hidden], &mut params.scope(&format!("blocks.{i}"))))
            .collect::<Result<_>>()?;
        let head = params.param("head.weight", &[outputs * area, width], small(), whole)?;
        let channels = [inputs, outputs];
        let drop_rate = config.drop_rate;
        Ok(Self { fields, patch, channels, drop_rate, pos_embed, proj_weight, proj_bias, blocks, head })
    }

    /// The fields `[batch, out_channels, height, width]` for `x` `[batch, in_channels, height, width]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let [height, width] = self.fields;
        let [inputs, outputs] = self.channels;
        let [p0, p1] = self.patch;
        let [h, w] = [height / p0, width / p1];
        let shape = x.shape();
        if shape.len() != 4 || shape[1..] != [inputs, height, width] {
            let want = format!("[batch, {inputs}, {height}, {width}]");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let batch = shape[0];

        // Tokens stand as [h, w, batch, features]: so the transforms over h and w and the products over features are plain
        // matrix products on the memory as it lies.
        let patches = x.reshape(&[batch, inputs, h, p0, w, p1])?.permute(&[2, 4, 0, 1, 3, 5])?;
        let patches = patches.reshape(&[h, w, batch, inputs * p0 * p1])?;
        let features = self.proj_bias.extent(0)?;
        let weight = self.proj_weight.reshape(&[features, inputs * p0 * p1])?;
        let position = self.pos_embed.reshape(&[h, w, 1, features])?;
        let tokens = patches.linear(&weight, Some(&self.proj_bias))?.add(&position)?;
        let mut tokens = mode.dropout(&tokens, self.drop_rate, BATCH_DIM, &[])?;
        for block in &self.blocks {
            tokens = block.forward(&tokens, mode)?;
        }
        let patches = tokens.linear(&self.head, None)?.reshape(&[h, w, batch, p0, p1, outputs])?;
        Ok(patches.permute(&[2, 5, 0, 3, 1, 4])?.reshape(&[batch, outputs, height, width])?)
    }
}
