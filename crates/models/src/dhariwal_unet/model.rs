//! DhariwalUNet.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::{DhariwalUNetConfig, MODEL};
use crate::batch::Batch;
use crate::error::Result;
use crate::model::Model;
use crate::song_unet::{SongUNet, Style};

/// The U-Net of ADM: Dhariwal and Nichol, *Diffusion Models Beat GANs on Image Synthesis*, arXiv:2105.05233, as in PhysicsNeMo.
///
/// It is [`SongUNet`](crate::SongUNet) with other blocks and another embedding e of the noise level τ, class labels c and
/// augmentation labels a:
///
/// ```text
/// e = silu(L₁ silu(L₀ ([cos ω τ, sin ω τ] + W_a a)) + W_c c),   ωₖ = 10000^(−k / n), n the number of cosines
/// B(x): h = conv₃(R silu(N(x)))
///       y = conv₃(dropout(silu(N(h) (1 + s) + t))) + conv₁(R x),   [s, t] = W e + b        conv₁ only if channels change
///       y ← y + P attention(Q N(y))                                in blocks with attention
/// ```
///
/// Sums are not scaled, norms have ε = 10⁻⁵, and attention heads have 64 channels. In levels whose height is in `attn_resolutions`,
/// all blocks on the way up have attention, too; the first block on the way up always has it. Initial weights are PyTorch's, but 0
/// in the last convolution of a block, P, W_a and the last layer: a fresh network returns 0.
///
/// Arrays of a batch: those of [`SongUNet`](crate::SongUNet).
///
/// State dict: that of PhysicsNeMo's `DhariwalUNet`, which is SongUNet's with `out_norm` and `out_conv`.
///
/// ```
/// use isobar_models::{DhariwalUNet, DhariwalUNetConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let small = DhariwalUNetConfig { model_channels: 64, channel_mult: vec![1, 1], num_blocks: 1, ..DhariwalUNetConfig::new([8, 8], 2, 2) };
/// let model = DhariwalUNet::new(&small, &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::ones([1, 2, 8, 8], (Kind::Float, Device::Cpu));
/// let y = model.forward(&x, &Tensor::from_slice(&[0.3f32]), None, None, Mode::Eval)?;
/// assert_eq!(y, Tensor::zeros([1, 2, 8, 8], (Kind::Float, Device::Cpu)));
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct DhariwalUNet<A = Tensor>(SongUNet<A>);

impl<A: Array> DhariwalUNet<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Those of [`SongUNet::new`]; attention over a number of channels that is no multiple of 64.
    pub fn new(config: &DhariwalUNetConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        Ok(Self(SongUNet::with_style(&config.network(), Style::Adm, params)?))
    }

    /// Computes `[batch, out_channels, height, width]` from `x` `[batch, in_channels, height, width]`, noise levels `[batch]` or
    /// `[1]`, class labels `[batch, label_dim]` or `[1, label_dim]`, and augmentation labels `[batch, augment_dim]`.
    ///
    /// # Errors
    ///
    /// Those of [`SongUNet::forward`].
    pub fn forward(
        &self,
        x: &A,
        noise_labels: &A,
        class_labels: Option<&A>,
        augment_labels: Option<&A>,
        mode: Mode<'_>,
    ) -> Result<A> {
        self.0.forward(x, Some(noise_labels), class_labels, augment_labels, mode)
    }
}

impl<A: Array> Model<A> for DhariwalUNet<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.0.forward_with_labels(x, batch, mode)?))
    }
}
