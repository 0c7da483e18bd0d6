//! Models, written once over [`isobar_array::Array`], with the architectures and state-dict names of PhysicsNeMo.
//!
//! | model | configuration | is |
//! |---|---|---|
//! | [`FullyConnected`] | [`FullyConnectedConfig`] | linear layers with activations between |
//! | [`Afno`] | [`AfnoConfig`] | Adaptive Fourier Neural Operator |
//! | [`ModAfno`] | [`ModAfnoConfig`] | the same, modulated by a number for each sample |
//! | [`DistributedAfno`] | [`DistributedAfnoConfig`] | the idea of AFNO with its channels split over ranks |
//! | [`Fno`] | [`FnoConfig`] | Fourier Neural Operator, in one to four dimensions |
//! | [`CNextUNet`] | [`CNextUNetConfig`] | U-Net of ConvNeXt blocks, of one to three dimensions |
//! | [`UNet`] | [`UNetConfig`] | U-Net of two or three dimensions |
//! | [`Pix2Pix`] | [`Pix2PixConfig`] | convolutions down to a coarser grid, residual blocks and transposed convolutions back, of one to three dimensions |
//! | [`SrResNet`] | [`SrResNetConfig`] | super-resolution residual network of three dimensions |
//!
//! They are made of the layers of [`isobar_nn`]. Each stands in a folder of its own: `config.rs` its arguments, `model.rs` its code for a single device, `sharding.rs` how
//! it is split over a mesh. One line, [`register!`], makes it a `type` of a TOML file's table `[model]` ([`ModelConfig`]); a
//! program's own model registers in the same way, see [`Architecture`].
//!
//! A model is made from its configuration and a [`Params`](isobar_shard::Params), which supplies its parameters by name; a
//! pass takes its input and a [`Mode`]. As a [`Model`] it takes and gives a [`Batch`] of named arrays. Models call no collective
//! and know no group: where ranks work together they go through the region that the supplier hands out.
//!
//! ```
//! use isobar_models::{Afno, AfnoConfig, Mode};
//! use isobar_array::Generator;
//! use isobar_shard::ParamStore;
//! use tch::{Device, Kind, Tensor};
//!
//! let config = AfnoConfig { patch_size: [4, 4], embed_dim: 32, num_blocks: 4, ..AfnoConfig::new([16, 24], 3, 2) };
//! let mut params = ParamStore::new(Generator::new(1));
//! let model = Afno::new(&config, &mut params)?;
//! let x = Tensor::zeros([2, 3, 16, 24], (Kind::Float, Device::Cpu));
//! let y = model.forward(&x, Mode::Eval)?;
//! assert_eq!(y.size(), [2, 2, 16, 24]);
//! # Ok::<(), isobar_models::Error>(())
//! ```

mod afno;
mod batch;
mod cnext_unet;
mod distributed_afno;
mod error;
mod fields;
mod fno;
mod fully_connected;
mod layers;
mod mod_afno;
mod model;
mod pix2pix;
mod registry;
mod sharding;
mod size;
mod sr_res_net;
mod unet;

#[doc(hidden)]
pub use inventory;

pub use afno::{Afno, AfnoConfig};
pub use batch::Batch;
pub use cnext_unet::{CNextUNet, CNextUNetConfig};
pub use distributed_afno::{DistributedAfno, DistributedAfnoConfig};
pub use error::{Error, Result};
pub use fields::FieldSpec;
pub use fno::{Fno, FnoConfig, PaddingType, PerDim};
pub use fully_connected::{FullyConnected, FullyConnectedConfig};
pub use isobar_nn::{Activation, BatchPart, Factorization, Mode};
pub use mod_afno::{EmbedMethod, ModAfno, ModAfnoConfig, ModEmbedConfig, ScaleShiftMode};
pub use model::{Architecture, LargestArray, Model};
pub use pix2pix::{Pix2Pix, Pix2PixConfig, Pix2PixPadding};
pub use registry::{Entry, ModelArray, ModelConfig, register, registered};
pub use sharding::Sharding;
pub use sr_res_net::{SrResNet, SrResNetConfig};
pub use unet::{Normalization, NormalizationArgs, PaddingMode, Pooling, UNet, UNetConfig, Upsampling};
