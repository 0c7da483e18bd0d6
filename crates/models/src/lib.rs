//! Models, written once over [`isobar_array::Array`], with the architectures and state-dict names of their sources: PhysicsNeMo, The Well,
//! Aurora and APEBench.
//!
//! | model | configuration | is |
//! |---|---|---|
//! | [`Afno`] | [`AfnoConfig`] | Adaptive Fourier Neural Operator |
//! | [`Aurora`] | [`AuroraConfig`] | weather model of attention between pressure levels and of shifted windows, in a U-Net |
//! | [`CNextUNet`] | [`CNextUNetConfig`] | U-Net of ConvNeXt blocks, of one to three dimensions |
//! | [`ConvNet`] | [`ConvNetConfig`] | convolutions of one extent with activations between, of one to three dimensions |
//! | [`DhariwalUNet`] | [`DhariwalUNetConfig`] | U-Net of diffusion models (ADM), of two dimensions |
//! | [`DistributedAfno`] | [`DistributedAfnoConfig`] | the idea of AFNO with its channels split over ranks |
//! | [`Dit`] | [`DitConfig`] | diffusion transformer: attention among patches, modulated by a time |
//! | [`Dlwp`] | [`DlwpConfig`] | U-Net on the six faces of a cubed sphere |
//! | [`EdmPrecond`] | [`EdmPrecondConfig`] | denoiser of diffusion models around [`SongUNet`], with conditions on the grid |
//! | [`EdmPrecondSuperResolution`] | [`EdmPrecondSuperResolutionConfig`] | the same for super-resolution: the coarse fields are always given |
//! | [`EdmPreconditioner`] | [`EdmPreconditionerConfig`] | denoiser of diffusion models around any network |
//! | [`Fengwu`] | [`FengwuConfig`] | weather model of shifted windows for each variable and over all of them |
//! | [`Flare`] | [`FlareConfig`] | attention between points of a cloud or field through a few trained queries |
//! | [`Fno`] | [`FnoConfig`] | Fourier Neural Operator, in one to four dimensions |
//! | [`FullyConnected`] | [`FullyConnectedConfig`] | linear layers with activations between |
//! | [`GeoTransolver`] | [`GeoTransolverConfig`] | Transolver that also attends to a geometry |
//! | [`HealpixUNet`] | [`HealpixUNetConfig`] | U-Net on the twelve faces of a HEALPix mesh |
//! | [`ModAfno`] | [`ModAfnoConfig`] | AFNO modulated by a number for each sample |
//! | [`Pangu`] | [`PanguConfig`] | weather model of shifted windows over levels, latitudes and longitudes |
//! | [`Pix2Pix`] | [`Pix2PixConfig`] | convolutions down to a coarser grid, residual blocks and transposed convolutions back, of one to three dimensions |
//! | [`SongUNet`] | [`SongUNetConfig`] | U-Net of diffusion models (DDPM++, NCSN++), of two dimensions |
//! | [`SongUNetPosEmbd`] | [`SongUNetPosEmbdConfig`] | [`SongUNet`] with positions on the grid as further channels |
//! | [`SongUNetPosLtEmbd`] | [`SongUNetPosLtEmbdConfig`] | the same with trained fields of the lead time, outputs may be probabilities |
//! | [`SrResNet`] | [`SrResNetConfig`] | super-resolution residual network of three dimensions |
//! | [`SwinRnn`] | [`SwinRnnConfig`] | recurrent weather model of shifted windows on four grids |
//! | [`Transolver`] | [`TransolverConfig`] | attention between points of a cloud or field through a few slices |
//! | [`UNet`] | [`UNetConfig`] | U-Net of two or three dimensions |
//! | [`Vit`] | [`VitConfig`] | vision transformer: attention among patches |
//!
//! They are made of the layers of [`isobar_nn`]. Each stands in a folder of its own: `config.rs` its arguments, `model.rs` its code for a single device, `sharding.rs` how
//! it is split over a mesh. One line, [`register!`], makes it a `type` of a TOML file's table `[model]` ([`ModelConfig`]); a
//! program's own model registers in the same way, see [`Architecture`].
//!
//! A model is made from its configuration and a [`Params`](isobar_shard::Params), which supplies its parameters by name; a
//! pass takes its input and a [`Mode`]. As a [`Model`] it takes and gives a [`Batch`] of named arrays. Models call no collective
//! and know no group: where ranks work together they go through the region that the supplier hands out. All ranks that share
//! parameters or sharded fields make the model, call `forward` with the same [`Mode`], and run backward, in the same order; a model
//! of dense tensors and parameters of its own rank needs no other rank.
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
mod aurora;
mod batch;
mod cnext_unet;
mod conv_net;
mod dhariwal_unet;
mod diffusion;
mod distributed_afno;
mod dit;
mod dlwp;
mod edm_precond;
mod edm_precond_super_resolution;
mod edm_preconditioner;
mod error;
mod faces;
mod fengwu;
mod fields;
mod flare;
mod fno;
mod fully_connected;
mod geo_transolver;
mod healpix_unet;
mod layers;
mod mod_afno;
mod model;
mod pangu;
mod pix2pix;
mod point_attention;
mod registry;
mod sharding;
mod signature;
mod size;
mod song_unet;
mod song_unet_pos_embd;
mod song_unet_pos_lt_embd;
mod sr_res_net;
mod swin_rnn;
mod traffic;
mod transolver;
mod unet;
mod vit;
mod windows;

#[doc(hidden)]
pub use inventory;

pub use afno::{Afno, AfnoConfig};
pub use aurora::{Aurora, AuroraConfig};
pub use batch::Batch;
pub use cnext_unet::{CNextUNet, CNextUNetConfig};
pub use conv_net::{ConvNet, ConvNetConfig};
pub use dhariwal_unet::{DhariwalUNet, DhariwalUNetConfig};
pub use diffusion::{
    Denoiser, EdmLoss, EdmPreconditioning, EdmSampler, EdmSchedule, LossReduction, Patching, SamplerKind,
    SigmaData,
};
pub use distributed_afno::{DistributedAfno, DistributedAfnoConfig};
pub use dit::{
    AttentionBackend, DetokenizerKind, Dit, DitAttention, DitBlockOptions, DitConditioning, DitConfig,
    DitDetokenizer, DitEmbedder, DitPositions, DitTokenizer, EmbedFn, LayerNormBackend, TokenizerKind,
};
pub use dlwp::{Dlwp, DlwpConfig};
pub use edm_precond::{EdmPrecond, EdmPrecondConfig, PrecondNetwork, SongNetwork};
pub use edm_precond_super_resolution::{EdmPrecondSuperResolution, EdmPrecondSuperResolutionConfig};
pub use edm_preconditioner::{EdmPreconditioner, EdmPreconditionerConfig, Network};
pub use error::{Error, Result};
pub use fengwu::{Fengwu, FengwuConfig};
pub use fields::FieldSpec;
pub use flare::{Flare, FlareConfig};
pub use fno::{Fno, FnoConfig, PaddingType, PerDim};
pub use fully_connected::{FullyConnected, FullyConnectedConfig};
pub use geo_transolver::{GeoAttention, GeoTransolver, GeoTransolverConfig, StateMixing, Streams};
pub use healpix_unet::{
    HealpixBlock, HealpixCoupled, HealpixCoupling, HealpixDecoder, HealpixEncoder, HealpixFunction,
    HealpixPooling, HealpixRecurrence, HealpixUNet, HealpixUNetConfig, HealpixUpsampling,
};
pub use isobar_nn::{Activation, BatchPart, Factorization, Mode};
pub use layers::QkNorm;
pub use mod_afno::{EmbedMethod, ModAfno, ModAfnoConfig, ModEmbedConfig, ScaleShiftMode};
pub use model::{Architecture, LargestArray, Model, ModelArray};
pub use pangu::{Pangu, PanguConfig};
pub use pix2pix::{Pix2Pix, Pix2PixConfig, Pix2PixPadding};
pub use registry::{Entry, ModelConfig, register, registered};
pub use sharding::Sharding;
pub use signature::Signature;
pub use song_unet::{DecoderType, EmbeddingType, EncoderType, SongUNet, SongUNetConfig};
pub use song_unet_pos_embd::{GridPositions, GridType, SongUNetPosEmbd, SongUNetPosEmbdConfig};
pub use song_unet_pos_lt_embd::{LeadTimes, SongUNetPosLtEmbd, SongUNetPosLtEmbdConfig};
pub use sr_res_net::{SrResNet, SrResNetConfig, SrResNetPadding};
pub use swin_rnn::{SwinRnn, SwinRnnConfig};
pub use traffic::{Split, Traffic};
pub use transolver::{Transolver, TransolverConfig};
pub use unet::{
    Normalization, NormalizationArgs, PaddingMode, Pooling, UNet, UNetConfig, UNetPadding,
    UNetPaddingKeyword, Upsampling,
};
pub use vit::{Vit, VitConfig, VitPositions};
