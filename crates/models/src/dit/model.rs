//! DiT.

use isobar_array::{Array, in_full_precision};
use isobar_nn::{AxialRotaryEmbedding, Mode, PatchEmbed, PositionEmbedding};
use isobar_shard::{Init, Params};
use tch::{Kind, Tensor};

use super::arguments;
use super::block::{Block, BlockConfig, Context};
use super::conditioning::Conditioning;
use super::detokenizer::{Detokenizer, Sizes};
use super::invalid::InvalidTokens;
use super::{DitConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::layers::{Recompute, patch_grid};
use crate::model::Model;

/// The diffusion transformer: Peebles and Xie, *Scalable Diffusion Models with Transformers*, arXiv:2212.09748, as PhysicsNeMo builds
/// it.
///
/// Patches become tokens of D features, plus a trained position. The time t of a sample, and its condition if there is one, become a
/// vector c of D features. Each block computes, with (a, s, g) for shift, scale and gate, and LN a layer norm without parameters,
///
/// ```text
/// (a₁, s₁, g₁, a₂, s₂, g₂) = W silu(c) + b
/// x ← x + g₁ · attention(LN(x) (1 + s₁) + a₁)
/// x ← x + g₂ · W₂ gelu(W₁ (LN(x) (1 + s₂) + a₂))
/// ```
///
/// and tokens become patches by (a, s) = W silu(c) + b, y = W (LN(x) (1 + s) + a). With `proj_reshape_2d_conv` convolutions of the
/// fields are added to them. The GELU of the blocks is the one of the hyperbolic tangent, that of the convolutions is exact.
///
/// | `conditioning_embedder` | c |
/// |---|---|
/// | `dit` | W₂ silu(W₁ [cos t f, sin t f]) + V condition, fₖ = 10000^(−k / n), n the number of cosines |
/// | `edm` | W₂ silu(W₁ ([sin t f, cos t f] + V √d condition)), fₖ = 10000^(−k / (n − 1)), d the condition's features |
/// | `zero` | none: the modulations are trained constants, and times are ignored. PhysicsNeMo makes such a model, but cannot run it |
///
/// A fresh model gives exactly 0, as all modulations and the last layer start with 0.
///
/// Attention is global (`timm`), or in windows of `attn_kernel` tokens along each dim (`natten2d`, `natten2d_rope`, and `natten3d`
/// on fields of three dims), which are shifted to stay inside the grid at its borders. On sharded fields, global attention is ring
/// attention or an all-to-all from tokens to heads, whichever moves fewer bytes; for windows, ranks receive only their halo.
///
/// Inputs: `fields` `[batch, in_channels, height, width]`, or `[batch, in_channels, depth, height, width]` if `input_size` has
/// three extents (PhysicsNeMo's has two); `time` `[batch]` or `[batch, 1]`, 0 where the batch has none;
/// `conditions` `[batch, condition_dim]`, optional; with `use_nan_mask_tokens` `invalid_mask`, optional (see
/// [`forward_masked`](Self::forward_masked)).
///
/// State dict, of PhysicsNeMo: `tokenizer.x_embedder.proj.{weight,bias}`, `tokenizer.pos_embed`; `conditioning_embedder.` with
/// `t_embedder.freqs`, `t_embedder.mlp.{0,2}.{weight,bias}`, `cond_embedder.weight`, or `map_noise.freqs`,
/// `map_{condition,layer0,layer1}.{weight,bias}`; `blocks.{i}.adaptive_modulation.1`, `blocks.{i}.attention.attn_op.{qkv,proj}` and
/// `{q,k}_norm`, without `attn_op` in windowed attention, `blocks.{i}.attention.mask_token`, `blocks.{i}.linear.layers.{0,2}`;
/// `detokenizer.proj_layer.{adaptive_modulation.1,output_projection}`, or the same under `detokenizer.proj` and
/// `detokenizer.conv_head.{2j}`. With `zero`, modulations have a `bias` only.
///
/// ```
/// use isobar_models::{Dit, DitConfig, Mode, PerDim};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let small = DitConfig { patch_size: PerDim::All(4), hidden_size: 32, depth: 2, num_heads: 4, ..DitConfig::new([16, 24], 3) };
/// let config = DitConfig { out_channels: Some(2), condition_dim: Some(5), ..small };
/// let model = Dit::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let options = (Kind::Float, Device::Cpu);
/// let (x, t) = (Tensor::ones([2, 3, 16, 24], options), Tensor::ones([2], options));
/// let y = model.forward(&x, &t, Some(&Tensor::ones([2, 5], options)), Mode::Eval)?;
/// assert_eq!(y, Tensor::zeros([2, 2, 16, 24], options));
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Dit<A = Tensor> {
    fields: Vec<i64>,
    inputs: i64,
    rotary: Option<AxialRotaryEmbedding>,
    patch_embed: PatchEmbed<A>,
    pos_embed: Option<PositionEmbedding<A>>,
    conditioning: Conditioning<A>,
    invalid_tokens: InvalidTokens,
    blocks: Vec<Recompute<Block<A>>>,
    detokenizer: Detokenizer<A>,
    full_precision: bool,
}

impl<A: Array> Dit<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Sizes that are 0 or do not divide each other; arguments of another embedder, detokenizer or backend than the chosen one;
    /// `attention_backend` `transformer_engine`; `use_nan_mask_tokens` with global attention; or `params` refuses a parameter.
    pub fn new(config: &DitConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        arguments::check(config)?;
        let [fields, patch] =
            patch_grid(&check, 3, ("input_size", &config.input_size), ("patch_size", &config.patch_size))?;
        let grid: Vec<i64> = fields.iter().zip(&patch).map(|(extent, patch)| extent / patch).collect();
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.outputs())?;
        let attention = arguments::attention(config, &grid)?;
        let (width, start) = (attention.width, attention.start);
        let block = arguments::block(config, attention)?;

        let tokenizer = &mut params.scope("tokenizer");
        let positions = match config.dit_initialization {
            true => Init::Normal { mean: 0.0, std: 0.02 },
            false => Init::Constant(0.0),
        };
        let pos_embed = match config.has_positions() {
            true => {
                let shape = [grid.iter().product(), width];
                Some(PositionEmbedding::with_init("pos_embed", shape, positions, tokenizer)?)
            }
            false => None,
        };
        let fan = patch.iter().fold(inputs, |all, &extent| all.saturating_mul(extent));
        let inits = match config.dit_initialization {
            true => {
                // Xavier-uniform, of the kernel as a matrix.
                let bound = (6.0 / (fan as f64 + width as f64)).sqrt();
                [Init::Uniform { low: -bound, high: bound }, Init::Constant(0.0)]
            }
            false => [Init::FanIn(fan), Init::FanIn(fan)],
        };
        let patch_embed =
            PatchEmbed::with_init(patch.clone(), [inputs, width], inits, &mut tokenizer.scope("x_embedder"))?;
        let conditioning = Conditioning::new(config, width, start, params)?;
        let conditioned = conditioning.is_conditioned();
        let invalid_tokens = InvalidTokens::new(patch.clone(), config.use_nan_mask_tokens);
        let sizes = Sizes { width, outputs, patch };
        let detokenizer = Detokenizer::new(config, sizes, (conditioned, start), params)?;
        let blocks = (0..config.depth)
            .map(|i| {
                let name = format!("blocks.{i}");
                let drop_path = config.drop_path_rates.as_ref().map_or(0.0, |rates| rates[i]);
                let made = BlockConfig { drop_path, conditioned, ..block };
                let made = Block::new(made, &mut params.scope(&name))?;
                Ok(Recompute::new(&name, made, config.gradient_checkpointing))
            })
            .collect::<Result<_>>()?;
        let rotary = attention.rotary;
        let full_precision = config.force_tokenization_fp32;
        Ok(Self {
            fields,
            inputs,
            rotary,
            patch_embed,
            pos_embed,
            conditioning,
            invalid_tokens,
            blocks,
            detokenizer,
            full_precision,
        })
    }

    /// Computes `[batch, out_channels, extents…]` from `x` `[batch, in_channels, extents…]`, times `t` `[batch]` and
    /// conditions `[batch, condition_dim]`.
    ///
    /// # Errors
    ///
    /// An input of another shape; conditions without `condition_dim`; or an operator fails.
    pub fn forward(&self, x: &A, t: &A, condition: Option<&A>, mode: Mode<'_>) -> Result<A> {
        self.forward_masked(x, t, condition, None, mode)
    }

    /// Computes [`forward`](Self::forward) with a mask of invalid points, which needs `use_nan_mask_tokens`: in the input of each
    /// block's attention, a trained token replaces the tokens that contain an invalid point. `invalid_mask` is
    /// `[batch, extents…]` or `[batch, 1, extents…]`, true or above 0 at invalid points, where `x` must be finite. Without it, all
    /// points are valid.
    ///
    /// Without a mask, the mask tokens get no gradient: give each training batch one.
    ///
    /// # Errors
    ///
    /// Those of [`forward`](Self::forward); a mask of another shape, or of a model without `use_nan_mask_tokens`.
    ///
    /// ```
    /// use isobar_models::{AttentionBackend, Dit, DitConfig, Mode, PerDim};
    /// use isobar_array::Generator;
    /// use isobar_shard::ParamStore;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let small = DitConfig { patch_size: PerDim::All(4), hidden_size: 32, depth: 2, num_heads: 4, ..DitConfig::new([16, 24], 3) };
    /// let windows = DitConfig { attention_backend: AttentionBackend::Natten2d, ..small };
    /// let config = DitConfig { use_nan_mask_tokens: true, ..windows };
    /// let model = Dit::new(&config, &mut ParamStore::new(Generator::new(1)))?;
    /// let options = (Kind::Float, Device::Cpu);
    /// let (x, t) = (Tensor::ones([2, 3, 16, 24], options), Tensor::ones([2], options));
    /// let invalid = Tensor::zeros([2, 16, 24], (Kind::Bool, Device::Cpu));
    /// let y = model.forward_masked(&x, &t, None, Some(&invalid), Mode::Eval)?;
    /// assert_eq!(y.size(), [2, 3, 16, 24]);
    /// # Ok::<(), isobar_models::Error>(())
    /// ```
    pub fn forward_masked(
        &self,
        x: &A,
        t: &A,
        condition: Option<&A>,
        invalid_mask: Option<&A>,
        mode: Mode<'_>,
    ) -> Result<A> {
        let (shape, dims) = (x.shape(), self.fields.len());
        if shape.len() != dims + 2 || shape[1] != self.inputs || shape[2..] != self.fields {
            let extents: Vec<String> = self.fields.iter().map(i64::to_string).collect();
            let want = format!("[batch, {}, {}]", self.inputs, extents.join(", "));
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        invalid_mask.map_or(Ok(()), |mask| self.invalid_tokens.check(mask, &shape))?;
        let c = self.conditioning.forward(shape[0], t, condition, mode)?;
        // Tokens are [grid…, batch, features]: vectors of a sample broadcast, and products over features are plain matrix products.
        let mut tokens = self.at_its_precision(x, |x| {
            let tokens = self.patch_embed.forward_grid(x)?;
            match &self.pos_embed {
                Some(positions) => Ok(positions.forward_grid(&tokens)?),
                None => Ok(tokens),
            }
        })?;
        let angles = self.rotary.map(|rotary| rotary.angles(&tokens)).transpose()?;
        let invalid = invalid_mask.map(|mask| self.invalid_tokens.mask(mask, &tokens)).transpose()?;
        let context = Context { c, angles, invalid };
        for block in &self.blocks {
            tokens = context.apply(block, &tokens, mode)?;
        }
        self.at_its_precision(&tokens, |tokens| {
            let c = context.c.map(|c| c.to_kind(tokens.kind())).transpose()?;
            self.detokenizer.forward(tokens, c.as_ref())
        })
    }

    /// Computes `f`; if so configured, in single precision where mixed precision is on. The result has the dtype of `x`.
    fn at_its_precision(&self, x: &A, f: impl FnOnce(&A) -> Result<A>) -> Result<A> {
        let half = matches!(x.kind(), Kind::Half | Kind::BFloat16);
        match self.full_precision {
            true => in_full_precision(x.device(), || match half {
                true => Ok(f(&x.to_kind(Kind::Float)?)?.to_kind(x.kind())?),
                false => f(x),
            }),
            false => f(x),
        }
    }
}

impl<A: Array> Model<A> for Dit<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let zeros;
        let t = match batch.get(Batch::<A>::TIME) {
            Some(t) => t,
            None => {
                zeros = x.detach()?.linspace_along(0, 0.0, 0.0)?;
                &zeros
            }
        };
        let [condition, invalid_mask] =
            [Batch::<A>::CONDITIONS, Batch::<A>::INVALID_MASK].map(|name| batch.get(name));
        Ok(Batch::of_fields(self.forward_masked(x, t, condition, invalid_mask, mode)?))
    }
}
