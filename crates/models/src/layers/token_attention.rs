//! Attention among the tokens of a grid.

use isobar_array::{Array, AttentionOptions};
use isobar_nn::{AxialRotaryEmbedding, Dropout, LayerNorm, Linear, LinearOptions, Mode, RmsNorm};
use isobar_shard::{Init, Params};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Checker, Error, Result};

/// The dim of the batch in tokens on their grid, `[h, w, batch, features]`.
pub(crate) const BATCH_DIM: usize = 2;

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

/// Initial values of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// PyTorch's.
    Torch,
    /// Xavier-uniform weights, biases of 0.
    Xavier,
    /// Truncated normal weights of standard deviation 0.02, biases of 0.
    Small,
    /// Zeros.
    Zero,
}

impl Start {
    pub(crate) fn options<A>(self) -> LinearOptions<A> {
        let weight_init = match self {
            Self::Torch => None,
            Self::Xavier => Some(Init::XavierUniform),
            Self::Small => Some(Init::TruncNormal { std: 0.02 }),
            Self::Zero => Some(Init::Constant(0.0)),
        };
        let bias_init = (self != Self::Torch).then_some(Init::Constant(0.0));
        LinearOptions { weight_init, bias_init, ..LinearOptions::default() }
    }
}

/// The keys that a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// All, or, if causal, its own and those before it in row-major order.
    Global { causal: bool },
    /// The window of so many rows and columns around it, moved into the grid at the borders.
    Window(i64),
}

/// Configuration of [`TokenAttention`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenAttentionConfig {
    pub(crate) model: &'static str,
    pub(crate) width: i64,
    pub(crate) heads: i64,
    pub(crate) reach: Reach,
    pub(crate) qkv_bias: bool,
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
        let proj = Linear::with_options(width, width, start.options(), &mut params.scope("proj"))?;
        Ok(Self { config, qkv, norms, proj, proj_drop: Dropout::new(config.proj_drop)? })
    }

    /// For tokens `[h, w, batch, features]`; `angles` are those of the rotary embedding.
    pub(crate) fn forward(&self, x: &A, angles: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let TokenAttentionConfig { width, heads, .. } = self.config;
        let shape = x.shape();
        self.check_part(shape[BATCH_DIM], mode)?;
        let by_head = [&shape[..3], &[heads, width / heads]].concat();
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
                let y = self.windowed([&q, &k, &v], kernel)?;
                Dropout::new(self.config.attn_drop)?.forward_parts(&y, mode, BATCH_DIM, &[])?
            }
        };
        let y = self.proj.forward(&mixed.reshape(&shape)?)?;
        Ok(self.proj_drop.forward_parts(&y, mode, BATCH_DIM, &[])?)
    }

    /// Attention of all tokens to all, of `[h, w, batch, heads, features]`.
    fn global(&self, qkv: [&A; 3], causal: bool, mode: Mode<'_>) -> Result<A> {
        let shape = qkv[0].shape();
        let &[h, w, batch, heads, features] = &shape[..] else { return self.misfit(shape) };
        // The order of the tokens is free, but for causal attention and the mask of dropout: where columns are split, they come first,
        // and parts stay in one piece.
        let ordered = causal || (self.config.attn_drop > 0.0 && mode.is_training());
        let turned = !ordered && columns_split(qkv[0]);
        let (first, second) = if turned { (1, 0) } else { (0, 1) };
        let flat = |x: &A| x.permute(&[2, 3, first, second, 4])?.reshape(&[batch, heads, h * w, features]);
        let y = self.attend([&flat(qkv[0])?, &flat(qkv[1])?, &flat(qkv[2])?], causal, None, mode)?;
        let (rows, columns) = if turned { (w, h) } else { (h, w) };
        let y = y.reshape(&[batch, heads, rows, columns, features])?;
        Ok(y.permute(&[2 + first, 2 + second, 0, 1, 4])?)
    }

    /// Computes attention in windows of `kernel` × `kernel` tokens. Each row of queries attends to the rows of its
    /// window; ranks receive only the halo rows, and a mask selects the columns.
    fn windowed(&self, qkv: [&A; 3], kernel: i64) -> Result<A> {
        // Rows and columns change roles where columns are split.
        let turned = columns_split(qkv[0]);
        let order: [i64; 5] = if turned { [1, 0, 2, 3, 4] } else { [0, 1, 2, 3, 4] };
        let [q, k, v] = [qkv[0].permute(&order)?, qkv[1].permute(&order)?, qkv[2].permute(&order)?];
        let shape = q.shape();
        let &[h, w, batch, heads, features] = &shape[..] else { return self.misfit(shape) };
        let rows = window_rows(&q, kernel)?;
        let windows = |x: &A| {
            let picked = x.index_select(0, &rows)?.reshape(&[h, kernel, w, batch, heads, features])?;
            picked.permute(&[0, 3, 4, 2, 1, 5])?.reshape(&[h, batch, heads, w * kernel, features])
        };
        let mask = q.constant(&columns_seen(w, kernel)?)?;
        let y = self.attend(
            [&q.permute(&[0, 2, 3, 1, 4])?, &windows(&k)?, &windows(&v)?],
            false,
            Some(&mask),
            Mode::Eval,
        )?;
        Ok(y.permute(&[0, 3, 1, 2, 4])?.permute(&order)?)
    }

    fn attend(&self, [q, k, v]: [&A; 3], is_causal: bool, mask: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let generator = match mode {
            Mode::Train { generator, .. } if self.config.attn_drop > 0.0 => Some(generator),
            _ => None,
        };
        let options = AttentionOptions {
            attn_mask: mask,
            is_causal,
            dropout_p: if generator.is_some() { self.config.attn_drop } else { 0.0 },
            generator,
            ..AttentionOptions::default()
        };
        Ok(A::scaled_dot_product_attention(q, k, v, &options)?)
    }

    /// Rejects dropout of attention weights on a part of the global batch: its samples' part of the dropout mask
    /// cannot be drawn alone.
    fn check_part(&self, samples: i64, mode: Mode<'_>) -> Result<()> {
        let partial = match mode {
            Mode::Train { batch: Some(part), .. } => part.offset != 0 || part.total != samples,
            _ => false,
        };
        let drops = self.config.attn_drop > 0.0 && matches!(self.config.reach, Reach::Global { .. });
        Checker(self.config.model).ensure(!(drops && partial), || {
            "attn_drop_rate is above 0 on a part of the batch; expected all samples of the global batch in one array: use sharded \
             fields and train.accumulate=1, or attn_drop_rate = 0"
                .to_owned()
        })
    }

    fn misfit<T>(&self, got: Vec<i64>) -> Result<T> {
        let want = "[h, w, batch, heads, features]".to_owned();
        Err(Error::Input { model: self.config.model, got, want })
    }
}

/// Returns whether the columns of a grid `[h, w, …]` are sharded and its rows are not.
fn columns_split<A: Array>(grid: &A) -> bool {
    grid.num_shards(&[0]) == 1 && grid.num_shards(&[1]) > 1
}

/// First of the `kernel` positions around position `at` of `extent`, all of them inside.
fn window_start(at: i64, extent: i64, kernel: i64) -> i64 {
    (at - kernel / 2).clamp(0, extent - kernel)
}

/// The rows of the windows of all rows of a grid `[h, …]`, `[h · kernel]`, laid out as the rows are.
fn window_rows<A: Array>(grid: &A, kernel: i64) -> Result<A> {
    let h = grid.extent(0)?;
    let at =
        grid.detach()?.narrow(-1, 0, 1)?.to_kind(Kind::Double)?.linspace_along(0, 0.0, (h - 1) as f64)?;
    let clamp = isobar_array::Unary::Clamp { min: 0.0, max: (h - kernel) as f64 };
    let start = at.add_scalar(-((kernel / 2) as f64))?.unary(clamp)?;
    let offsets: Vec<f64> = (0..kernel).map(|offset| offset as f64).collect();
    let offsets = grid.constant(&table(Tensor::f_from_slice(&offsets))?)?;
    let rows = start.reshape(&[h, 1])?.add(&offsets.reshape(&[1, kernel])?)?;
    Ok(rows.reshape(&[h * kernel])?.to_kind(Kind::Int64)?)
}

/// Which of the keys `[w, kernel]`, flattened, a query of each column sees: `[w, w · kernel]`.
fn columns_seen(w: i64, kernel: i64) -> Result<Tensor> {
    let seen = |query: i64, column: i64| {
        let start = window_start(query, w, kernel);
        (start..start + kernel).contains(&column)
    };
    let values: Vec<bool> =
        (0..w).flat_map(|query| (0..w * kernel).map(move |key| seen(query, key / kernel))).collect();
    table(Tensor::f_from_slice(&values).and_then(|values| values.f_reshape([w, w * kernel])))
}

fn table(made: Result<Tensor, tch::TchError>) -> Result<Tensor> {
    Ok(isobar_array::kernel::named("window", &[], made)?)
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
