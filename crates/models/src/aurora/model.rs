//! Aurora.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::backbone::Backbone;
use super::decoder::Decoder;
use super::encoder::Encoder;
use super::geometry::Geometry;
use super::{AuroraConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::model::Model;

/// Aurora: Bodnar et al., *A foundation model for the Earth system*, Nature 641 (2025), arXiv:2405.13063.
///
/// Patches of each level become tokens. A perceiver (Jaegle et al., arXiv:2103.03206) reads those of the pressure levels of a patch
/// column into a few latent levels; the surface is one more. With e for Fourier expansions, S for a stage of blocks and l a block's
/// latents,
///
/// ```text
/// l ← l + norm(attention(l, x)),  l ← l + norm(W₂ gelu(W₁ l))
/// x = [surface, l] + W e(latitude, longitude) + W e(√area) + W e(lead time) + W e(time)
/// xₖ₊₁ = down(Sₖ(xₖ))                       half the rows and columns, twice the features
/// y = up(S(x)),  y ← up(S(y)) + skip, …     back to the first grid, whose skip is joined: twice the features
///
/// block: x ← x + norm(attention(x), c),  x ← x + norm(W₂ gelu(W₁ x), c)     c = W₂ silu(W₁ e(lead time))
/// norm(x, c) = LN(x) · scale + shift,  (shift, scale) = W silu(c) + b
/// ```
///
/// The first level gives the surface; a second perceiver asks the others for each pressure level. Attention is within windows of
/// `window_size`; odd blocks shift them by half a window. Longitudes go round: tokens on both sides of the date line see each other
/// where no margin is between them.
///
/// As in the source:
///
/// - The skip between the coarsest grids is not used; the finest one is used twice if there are three stages.
/// - The area of a patch has the factor π, and that between its first and last points counts.
/// - Its 721 latitudes are cropped to 720 before; here `img_size` is what the model sees.
///
/// Without what only some of its versions have: LoRA, clamped variables, embeddings or heads by level.
///
/// Inputs: `fields` `[batch, channel, row, column]` with `max_history_size` frames, the oldest first, each of the variables at the
/// surface and then each other variable on all levels, and after them the static fields, all normalised; `time` `[batch, 1]` of the
/// last frame, in hours since the start of 1970 (`isobar train` converts times from other units). Output: the channels of one frame,
/// `lead_time` later.
///
/// State dict: `encoder.{surf,atmos}_token_embeds.{weights.NAME,bias}`, `encoder.level_agg`, `encoder.*_embed`,
/// `backbone.{encoder,decoder}_layers.{i}.blocks.{j}`, `backbone.time_mlp`, `decoder.level_decoder`, `decoder.{surf,atmos}_heads.NAME`.
///
/// ```
/// use isobar_models::{Aurora, AuroraConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = AuroraConfig {
///     img_size: [16, 32],
///     atmos_levels: vec![500.0, 850.0],
///     embed_dim: 8,
///     num_heads: 2,
///     window_size: [2, 2, 4],
///     encoder_depths: vec![1, 1],
///     encoder_num_heads: vec![1, 2],
///     decoder_depths: vec![1, 1],
///     decoder_num_heads: vec![2, 1],
///     ..AuroraConfig::default()
/// };
/// let model = Aurora::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let options = (Kind::Float, Device::Cpu);
/// let fields = Tensor::zeros([1, config.in_channels() as i64, 16, 32], options);
/// let y = model.forward(&fields, &Tensor::full([1, 1], 490_000.0, options), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 4 + 5 * 2, 16, 32]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Aurora<A = Tensor> {
    /// Channels, rows and columns.
    input: [i64; 3],
    encoder: Encoder<A>,
    backbone: Backbone<A>,
    decoder: Decoder<A>,
}

impl<A: Array> Aurora<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0 or too large; fields that the patch, or features that the heads do not divide; lists of other lengths than the
    /// number of stages; coordinates, levels or a lead time out of range; or `params` refuses a parameter.
    pub fn new(config: &AuroraConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let geometry = Geometry::new(config)?;
        let [surface, statics, upper] = [&config.surf_vars[..], &config.static_vars, &config.atmos_vars];
        let names = [surface, statics, upper];
        let encoder = Encoder::new(&geometry, names, config.enc_depth, &mut params.scope("encoder"))?;
        let backbone =
            Backbone::new(&geometry, config.gradient_checkpointing, &mut params.scope("backbone"))?;
        let hidden = (2.0 * geometry.width as f64 * config.dec_mlp_ratio) as i64;
        let decoder = &mut params.scope("decoder");
        let decoder = Decoder::new(&geometry, [surface, upper], (config.dec_depth, hidden), decoder)?;
        let input = [config.in_channels() as i64, geometry.rows, geometry.columns];
        Ok(Self { input, encoder, backbone, decoder })
    }

    /// Computes the next frame `[batch, channel, row, column]` from `x` `[batch, channel, row, column]` and `times` `[batch, 1]`.
    ///
    /// # Errors
    ///
    /// An input of another shape, or an operator fails.
    pub fn forward(&self, x: &A, times: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        if shape.len() != 4 || shape[1..] != self.input {
            let [channels, rows, columns] = self.input;
            let want = format!("[batch, {channels}, {rows}, {columns}]");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        if times.shape() != [shape[0], 1] {
            let want = format!("times [{}, 1]", shape[0]);
            return Err(Error::Input { model: MODEL, got: times.shape(), want });
        }
        let tokens = self.encoder.forward(x, times)?;
        let [surface, upper] = self.decoder.forward(&self.backbone.forward(&tokens, mode)?)?;
        Ok(A::cat(&[&surface, &upper], 1)?)
    }
}

impl<A: Array> Model<A> for Aurora<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let times = batch.require(MODEL, Batch::<A>::TIME)?;
        Ok(Batch::of_fields(self.forward(x, times, mode)?))
    }
}
