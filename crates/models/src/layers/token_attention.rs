//! Attention among the tokens of a grid.

use isobar_array::{Array, AttentionOptions};
use isobar_nn::{AxialRotaryEmbedding, Dropout, LayerNorm, Linear, LinearOptions, Mode, RmsNorm};
use isobar_shard::Params;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::start::Start;
use super::window_attention::windowed;
use crate::error::{Checker, Result};

/// Returns the batch dim of tokens on their grid, `[grid…, batch, features]`.
pub(crate) fn batch_dim<A: Array>(tokens: &A) -> usize {
    tokens.shape().len().saturating_sub(2)
}

/// Norm of queries and keys over the features of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum QkNorm {
    /// Root mean square, ε = 10⁻⁶, with a weight.
    #[serde(rename = "RMSNorm")]
    RmsNorm,
    /// Layer norm, ε = 10⁻⁵, with a weight and a bias.
    LayerNorm,
}

impl QkNorm {
    /// ε, as in timm.
    pub(crate) fn eps(self) -> f64 {
        match self {
            Self::RmsNorm => 1e-6,
            Self::LayerNorm => 1e-5,
        }
    }
}

/// The keys that a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// All, or, if causal, its own and those before it in row-major order.
    Global { causal: bool },
    /// The window of these extents around the query, shifted into the grid at its borders. Grids of fewer dims use the last ones.
    Window([i64; 3]),
}

/// Checks the extents of the window of neighbourhood attention on a grid of tokens, for [`Reach::Window`]: odd, and no larger than the
/// grid. `name` is that of the argument.
pub(crate) fn attention_window(
    check: &Checker,
    name: &'static str,
    extents: &[usize],
    grid: &[i64],
) -> Result<[i64; 3]> {
    let dims = grid.len();
    check
        .ensure(extents.len() == dims, || format!("{name} has {} numbers, expected {dims}", extents.len()))?;
    let mut window = [1; 3];
    for ((own, &given), &tokens) in window[3 - dims..].iter_mut().zip(extents).zip(grid) {
        *own = check.extent(name, given)?;
        check.ensure(*own % 2 == 1 && *own <= tokens, || {
            format!("{name} is {own}, expected an odd number of at most {tokens}, the number of tokens along that dim")
        })?;
    }
    Ok(window)
}

/// Configuration of [`TokenAttention`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenAttentionConfig {
    pub(crate) width: i64,
    pub(crate) heads: i64,
    pub(crate) reach: Reach,
    pub(crate) qkv_bias: bool,
    pub(crate) proj_bias: bool,
    /// The norm, with or without parameters, and its ε.
    pub(crate) qk_norm: Option<(QkNorm, bool, f64)>,
    pub(crate) start: Start,
    pub(crate) attn_drop: f64,
    pub(crate) proj_drop: f64,
    pub(crate) rotary: Option<AxialRotaryEmbedding>,
}

/// Multi-head self-attention of tokens on their grid, with timm's names: `qkv`, `q_norm`, `k_norm`, `proj`.
#[derive(Debug)]
pub(crate) struct TokenAttention<A> {
    config: TokenAttentionConfig,
    qkv: Linear<A>,
    norms: Option<[HeadNorm<A>; 2]>,
    proj: Linear<A>,
    proj_drop: Dropout,
}

#[derive(Debug)]
enum HeadNorm<A> {
    Rms(RmsNorm<A>),
    Layer(LayerNorm<A>),
}

impl<A: Array> HeadNorm<A> {
    fn new(
        (norm, affine, eps): (QkNorm, bool, f64),
        features: i64,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        Ok(match (norm, affine) {
            (QkNorm::RmsNorm, true) => Self::Rms(RmsNorm::new(&[features], Some(eps), params)?),
            (QkNorm::RmsNorm, false) => Self::Rms(RmsNorm::without_affine(&[features], Some(eps))?),
            (QkNorm::LayerNorm, true) => Self::Layer(LayerNorm::with_eps(&[features], eps, params)?),
            (QkNorm::LayerNorm, false) => Self::Layer(LayerNorm::without_affine(&[features], eps)?),
        })
    }

    fn forward(&self, x: &A) -> Result<A> {
        Ok(match self {
            Self::Rms(norm) => norm.forward(x)?,
            Self::Layer(norm) => norm.forward(x)?,
        })
    }
}

impl<A: Array> TokenAttention<A> {
    /// Makes the layer; the number of heads divides the width.
    pub(crate) fn new(config: TokenAttentionConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let TokenAttentionConfig { width, heads, start, .. } = config;
        let options = LinearOptions { bias: config.qkv_bias, ..start.options() };
        let qkv = Linear::with_options(width, 3 * width, options, &mut params.scope("qkv"))?;
        let mut norm = |name: &str| {
            let made = config.qk_norm.map(|norm| HeadNorm::new(norm, width / heads, &mut params.scope(name)));
            made.transpose()
        };
        let norms = norm("q_norm")?.zip(norm("k_norm")?).map(|(q, k)| [q, k]);
        let options = LinearOptions { bias: config.proj_bias, ..start.options() };
        let proj = Linear::with_options(width, width, options, &mut params.scope("proj"))?;
        Ok(Self { config, qkv, norms, proj, proj_drop: Dropout::new(config.proj_drop)? })
    }

    /// Computes attention among tokens `[grid…, batch, features]`; `angles` are those of the rotary embedding.
    pub(crate) fn forward(&self, x: &A, angles: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let TokenAttentionConfig { width, heads, .. } = self.config;
        let (shape, batch_dim) = (x.shape(), batch_dim(x));
        let by_head = [&shape[..=batch_dim], &[heads, width / heads]].concat();
        let qkv = self.qkv.forward(x)?;
        let third = |index: i64| qkv.narrow(-1, index * width, width)?.reshape(&by_head);
        let (mut q, mut k, v) = (third(0)?, third(1)?, third(2)?);
        if let Some([of_q, of_k]) = &self.norms {
            (q, k) = (of_q.forward(&q)?, of_k.forward(&k)?);
        }
        if let (Some(rotary), Some(angles)) = (&self.config.rotary, angles) {
            (q, k) = (rotary.forward(&q, angles)?, rotary.forward(&k, angles)?);
        }
        let mixed = match self.config.reach {
            Reach::Global { causal } => self.global([&q, &k, &v], causal, mode)?,
            // NATTEN has no dropout inside: PhysicsNeMo's acts on the result.
            Reach::Window(kernel) => {
                let kernel = &kernel[kernel.len() - batch_dim..];
                let y =
                    windowed([&q, &k, &v], kernel, |qkv, mask| self.attend(qkv, false, mask, Mode::Eval))?;
                Dropout::new(self.config.attn_drop)?.forward_parts(&y, mode, batch_dim, &[])?
            }
        };
        let y = self.proj.forward(&mixed.reshape(&shape)?)?;
        Ok(self.proj_drop.forward_parts(&y, mode, batch_dim, &[])?)
    }

    /// Computes global attention on `[grid…, batch, heads, features]`.
    fn global(&self, qkv: [&A; 3], causal: bool, mode: Mode<'_>) -> Result<A> {
        let shape = qkv[0].shape();
        let dims = shape.len() - 3;
        // Except for causal attention and dropout masks, the order of tokens is free: split dims come first, so that shards stay
        // contiguous.
        let ordered = causal || (self.config.attn_drop > 0.0 && mode.is_training());
        let mut grid: Vec<usize> = (0..dims).collect();
        if !ordered {
            grid.sort_by_key(|&dim| std::cmp::Reverse(qkv[0].num_shards(&[dim])));
        }
        let others = [dims, dims + 1, dims + 2];
        let order: Vec<i64> =
            [&others[..2], &grid[..], &others[2..]].concat().iter().map(|&dim| dim as i64).collect();
        let tokens = shape[..dims].iter().product();
        let flat =
            |x: &A| x.permute(&order)?.reshape(&[shape[dims], shape[dims + 1], tokens, shape[dims + 2]]);
        let y = self.attend([&flat(qkv[0])?, &flat(qkv[1])?, &flat(qkv[2])?], causal, None, mode)?;
        let turned: Vec<i64> = order.iter().map(|&dim| shape[dim as usize]).collect();
        let mut back = vec![0; order.len()];
        for (at, &dim) in order.iter().enumerate() {
            back[dim as usize] = at as i64;
        }
        Ok(y.reshape(&turned)?.permute(&back)?)
    }

    fn attend(&self, [q, k, v]: [&A; 3], is_causal: bool, mask: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let (generator, batch) = match mode {
            Mode::Train { generator, batch } if self.config.attn_drop > 0.0 => (Some(generator), batch),
            _ => (None, None),
        };
        let options = AttentionOptions {
            attn_mask: mask,
            is_causal,
            dropout_p: if generator.is_some() { self.config.attn_drop } else { 0.0 },
            generator,
            batch: batch.map(|part| (part.offset, part.total)),
            ..AttentionOptions::default()
        };
        Ok(A::scaled_dot_product_attention(q, k, v, &options)?)
    }
}

/// The rotary embedding of heads of so many features, its base given with the name of the argument.
pub(crate) fn axial_rotary(
    model: &'static str,
    (name, base): (&str, f64),
    features: i64,
) -> Result<AxialRotaryEmbedding> {
    let check = Checker(model);
    check.ensure(base.is_finite() && base > 0.0, || {
        format!("{name} is {base}, expected a finite number above 0")
    })?;
    check.ensure(features % 4 == 0, || {
        format!("a head has {features} features, expected a multiple of 4 for rotary positions in rows and columns")
    })?;
    Ok(AxialRotaryEmbedding::with_base(features, base)?)
}

/// Width of a perceptron's hidden layer.
pub(crate) fn hidden_width(check: &Checker, width: i64, mlp_ratio: f64) -> Result<i64> {
    let hidden = (width as f64 * mlp_ratio) as i64;
    check.ensure((1..=i64::from(i32::MAX)).contains(&hidden), || {
        format!("mlp_ratio {mlp_ratio} leaves no hidden layer of a possible width")
    })?;
    Ok(hidden)
}
