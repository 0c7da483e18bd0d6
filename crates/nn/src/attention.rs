//! Multi-head attention.

use isobar_array::{Array, AttentionOptions, AttentionStrategy};
use isobar_shard::{Init, Params, Placement, Result};

use crate::check::{divisible, extent, probability, refuse};
use crate::layer::Layer;
use crate::linear::{Linear, LinearOptions};
use crate::mode::Mode;

const OP: &str = "MultiheadAttention";

/// Options of [`MultiheadAttention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MultiheadAttentionOptions {
    /// Adds biases to the projections.
    pub bias: bool,
    /// Dropout of the attention weights in training.
    pub dropout: f64,
    /// Arrays are `[batch, tokens, embed_dim]` instead of `[tokens, batch, embed_dim]`.
    pub batch_first: bool,
    /// Exchange between ranks where sequences are split: ring attention, all-to-all over heads, or whichever moves the fewest
    /// bytes.
    pub strategy: AttentionStrategy,
    /// Windowed attention: tokens attend only within consecutive windows of this many tokens. Shards that hold complete windows
    /// need no exchange.
    pub window: Option<i64>,
}

impl Default for MultiheadAttentionOptions {
    fn default() -> Self {
        Self { bias: true, dropout: 0.0, batch_first: false, strategy: AttentionStrategy::Auto, window: None }
    }
}

/// Multi-head attention (`torch.nn.MultiheadAttention`): Vaswani et al., *Attention Is All You Need*, arXiv:1706.03762.
///
/// Over sharded arrays the sequences may be split over ranks; see
/// [`MultiheadAttentionOptions::strategy`]. The attention weights are never materialised and not returned
/// (`need_weights=False`); queries, keys and values have the same number of features (no `kdim`, `vdim`).
///
/// Shapes: query `[queries, batch, embed_dim]`, key and value `[keys, batch, embed_dim]`, output as the query; with
/// `batch_first`, `[batch, tokens, embed_dim]`. State dict: `in_proj_weight` `[3 embed_dim, embed_dim]`, Xavier-uniform at first,
/// `in_proj_bias` `[3 embed_dim]`, 0; `out_proj.weight`, as of a [`Linear`], and `out_proj.bias`, 0.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{Mode, MultiheadAttention, MultiheadAttentionOptions};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let mut params = ParamStore::new(Generator::new(1));
/// let options = MultiheadAttentionOptions { batch_first: true, ..Default::default() };
/// let attention = MultiheadAttention::new(16, 4, options, &mut params)?;
/// let x = Tensor::ones([2, 10, 16], (Kind::Float, Device::Cpu));
/// assert_eq!(attention.forward(&x, &x, &x, None, false, Mode::Eval)?.size(), [2, 10, 16]);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct MultiheadAttention<A> {
    width: i64,
    heads: i64,
    in_weight: A,
    in_bias: Option<A>,
    out: Linear<A>,
    options: MultiheadAttentionOptions,
}

impl<A: Array> MultiheadAttention<A> {
    /// Makes the layer.
    ///
    /// # Errors
    ///
    /// `embed_dim` is not divisible by `num_heads`, a dropout outside [0, 1), a window below 1, or a parameter that `params`
    /// refuses.
    pub fn new(
        embed_dim: i64,
        num_heads: i64,
        options: MultiheadAttentionOptions,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let (width, heads) = (extent(OP, "embed_dim", embed_dim)?, extent(OP, "num_heads", num_heads)?);
        divisible(OP, ("embed_dim", width), ("num_heads", heads))?;
        probability(OP, "dropout", options.dropout)?;
        options.window.map(|tokens| extent(OP, "window", tokens)).transpose()?;
        let shape = [3 * width, width];
        let in_weight = params.param("in_proj_weight", &shape, Init::XavierUniform, Placement::Replicate)?;
        let in_bias = match options.bias {
            true => {
                Some(params.param("in_proj_bias", &shape[..1], Init::Constant(0.0), Placement::Replicate)?)
            }
            false => None,
        };
        let linear = LinearOptions {
            bias: options.bias,
            bias_init: Some(Init::Constant(0.0)),
            ..LinearOptions::default()
        };
        let out = Linear::with_options(width, width, linear, &mut params.scope("out_proj"))?;
        Ok(Self { width, heads, in_weight, in_bias, out, options })
    }

    /// Computes the attention of `query` to `key` and `value`. `attn_mask` broadcasts to the scores `[batch, heads, queries,
    /// keys]`: of dtype `Bool`, where *true* lets a query see a key (as in `scaled_dot_product_attention`; PyTorch's module
    /// takes the negation), or added to the scores. `is_causal` hides later keys. With sharded arrays all ranks call.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a mask with `is_causal` or with windows; a window that does not divide the tokens; the errors of
    /// the exchange.
    pub fn forward(
        &self,
        query: &A,
        key: &A,
        value: &A,
        attn_mask: Option<&A>,
        is_causal: bool,
        mode: Mode<'_>,
    ) -> Result<A> {
        if self.options.window.is_some() && attn_mask.is_some() {
            return refuse(OP, "a mask together with windows; expected one of them".to_owned());
        }
        let [q, k, v] = [self.project(query, 0)?, self.project(key, 1)?, self.project(value, 2)?];
        let (generator, batch) = match mode {
            Mode::Train { generator, batch } if self.options.dropout > 0.0 => (Some(generator), batch),
            _ => (None, None),
        };
        let options = AttentionOptions {
            attn_mask,
            is_causal,
            dropout_p: if generator.is_some() { self.options.dropout } else { 0.0 },
            generator,
            batch: batch.map(|part| (part.offset, part.total)),
            strategy: self.options.strategy,
            ..AttentionOptions::default()
        };
        let mixed = A::scaled_dot_product_attention(&q, &k, &v, &options)?;
        let mixed = match (self.options.window, &mixed.shape()[..]) {
            (Some(_), &[batch, heads, windows, tokens, features]) => {
                mixed.reshape(&[batch, heads, windows * tokens, features])?
            }
            _ => mixed,
        };
        let order = if self.options.batch_first { [0, 2, 1, 3] } else { [2, 0, 1, 3] };
        let joined = mixed.permute(&order)?.reshape(&query.shape())?;
        self.out.forward(&joined)
    }

    /// Returns a third of the projection as heads, `[batch, heads, tokens, features]`, or `[batch, heads, windows, tokens,
    /// features]`.
    fn project(&self, x: &A, third: i64) -> Result<A> {
        let &[first, second, width] = &x.shape()[..] else { return self.misfit(x) };
        if width != self.width {
            return self.misfit(x);
        }
        let weight = self.in_weight.narrow(0, third * width, width)?;
        let bias = self.in_bias.as_ref().map(|bias| bias.narrow(0, third * width, width)).transpose()?;
        let features = width / self.heads;
        let heads = x.linear(&weight, bias.as_ref())?.reshape(&[first, second, self.heads, features])?;
        let (order, batch, tokens) = match self.options.batch_first {
            true => ([0, 2, 1, 3], first, second),
            false => ([1, 2, 0, 3], second, first),
        };
        let heads = heads.permute(&order)?;
        let Some(window) = self.options.window else { return Ok(heads) };
        divisible(OP, ("the number of tokens", tokens), ("the window", window))?;
        Ok(heads.reshape(&[batch, self.heads, tokens / window, window, features])?)
    }

    fn misfit<T>(&self, x: &A) -> Result<T> {
        let (shape, width) = (x.shape(), self.width);
        let dims = if self.options.batch_first { "batch, tokens" } else { "tokens, batch" };
        refuse(OP, format!("input of shape {shape:?}, expected [{dims}, {width}]"))
    }
}

/// Self-attention without a mask.
impl<A: Array> Layer<A> for MultiheadAttention<A> {
    fn apply(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.forward(x, x, x, None, false, mode)
    }
}
