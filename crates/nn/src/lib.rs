//! Neural-network layers, written once over [`isobar_array::Array`]. The same code runs on dense tensors and on sharded ones,
//! whose operators do the communication. Names, defaults, initial values and state-dict names are PyTorch's.
//! This crate calls no collective and knows no particular model.
//!
//! | layer | PyTorch |
//! |---|---|
//! | [`Linear`] | `torch.nn.Linear` |
//! | [`Conv1d`], [`Conv2d`], [`Conv3d`], [`ConvNd`] | `torch.nn.Conv1d` … |
//! | [`ConvTranspose1d`], [`ConvTranspose2d`], [`ConvTranspose3d`], [`ConvTransposeNd`] | `torch.nn.ConvTranspose1d` … |
//! | [`LayerNorm`], [`RmsNorm`], [`GroupNorm`], [`InstanceNorm`], [`BatchNorm`] | `torch.nn.LayerNorm`, `RMSNorm`, … |
//! | [`Activation`], [`ActivationLayer`] | `torch.nn.GELU`, `PReLU`, … |
//! | [`Dropout`], [`DropPath`] | `torch.nn.Dropout`, `torchvision.ops.StochasticDepth` |
//! | [`ConcreteDropout`] | PhysicsNeMo's `ConcreteDropout` |
//! | [`Mlp`] | `timm.layers.Mlp` |
//! | [`Embedding`], [`PatchEmbed`] | `torch.nn.Embedding`, `timm.layers.PatchEmbed` |
//! | [`PositionEmbedding`], [`SinusoidalEmbedding`], [`RotaryEmbedding`], [`AxialRotaryEmbedding`] | |
//! | [`MultiheadAttention`] | `torch.nn.MultiheadAttention` |
//! | [`SpectralConv`] | PhysicsNeMo's `SpectralConv1d` … `4d` |
//! | [`Sequential`], [`Layer`] | `torch.nn.Sequential`, `Module` |
//!
//! A layer takes its parameters by name from a [`Params`](isobar_shard::Params), under the scope that it is given. Layers whose
//! training differs from evaluation take a [`Mode`].
//!
//! On dense arrays a layer communicates with nobody. On sharded arrays, all ranks of the mesh make the layers and call `forward` in
//! the same order, and run backward: operators exchange halos and partial results. Arrays are
//! `[batch, channel, height, width]` or, for tokens, `[batch, token, feature]`.
//!
//! ```
//! use isobar_array::{Array, Conv, Generator, Padding};
//! use isobar_nn::{Conv2d, GroupNorm, Result};
//! use isobar_shard::{ParamStore, Params};
//! use tch::{Device, Kind, Tensor};
//!
//! /// x + conv(relu(norm(x)))
//! struct Residual<A> {
//!     norm: GroupNorm<A>,
//!     conv: Conv2d<A>,
//! }
//!
//! impl<A: Array> Residual<A> {
//!     fn new(channels: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
//!         let same = Conv { padding: Padding::Same, ..Conv::default() };
//!         Ok(Self {
//!             norm: GroupNorm::new(4, channels, &mut params.scope("norm"))?,
//!             conv: Conv2d::new(channels, channels, [3, 3], same, &mut params.scope("conv"))?,
//!         })
//!     }
//!
//!     fn forward(&self, x: &A) -> Result<A> {
//!         Ok(x.add(&self.conv.forward(&self.norm.forward(x)?.relu()?)?)?)
//!     }
//! }
//!
//! let mut params = ParamStore::new(Generator::new(1));
//! let block = Residual::new(8, &mut params)?;
//! let y = block.forward(&Tensor::ones([1, 8, 6, 6], (Kind::Float, Device::Cpu)))?;
//! assert_eq!(y.size(), [1, 8, 6, 6]);
//! # Ok::<(), isobar_nn::Error>(())
//! ```

mod activation;
mod attention;
mod axial;
mod batch_norm;
mod check;
mod concrete_dropout;
mod conv;
mod dropout;
mod embedding;
mod layer;
mod linear;
mod mlp;
mod mode;
mod norm;
mod position;
mod spectral;
mod spectral_weight;

pub use activation::{Activation, ActivationLayer, Functional, one_or_many};
pub use attention::{MultiheadAttention, MultiheadAttentionOptions};
pub use axial::AxialRotaryEmbedding;
pub use batch_norm::{BatchNorm, BatchNormOptions};
pub use concrete_dropout::ConcreteDropout;
pub use conv::{
    Conv1d, Conv2d, Conv3d, ConvNd, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, ConvTransposeNd,
};
pub use dropout::{DropPath, Dropout};
pub use embedding::{Embedding, PatchEmbed};
pub use isobar_shard::{Error, Result};
pub use layer::{Layer, Sequential};
pub use linear::{Linear, LinearOptions, WeightForm};
pub use mlp::{Mlp, MlpOptions};
pub use mode::{BatchPart, Mode, Part};
pub use norm::{GroupNorm, InstanceNorm, LayerNorm, RmsNorm};
pub use position::{PositionEmbedding, RotaryEmbedding, SinusoidalEmbedding};
pub use spectral::{Factorization, SpectralConv, SpectralOptions};
