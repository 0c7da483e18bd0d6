//! Isobar under one name: a program of your own depends on this crate alone.
//!
//! | | |
//! |---|---|
//! | [`prelude`] | the types that most programs use |
//! | [`Trainer`] | trains a model on fields over a mesh of ranks: model, data, mesh, and nothing else |
//! | [`App`] | the command line `isobar` with a program's own models, data formats and optimizers, named in its TOML files |
//! | [`main`] | body of `main`: prints an error once for all ranks and returns the exit code of its cause |
//! | [`nn`] | layers, with PyTorch's names, defaults and state dicts |
//! | [`train`], [`models`], [`data`], [`files`] | training, models, data sets, and files from outside |
//! | [`array`](mod@array), [`shard`], [`mesh`] | the operators that models call, sharded tensors, the mesh of the ranks |
//! | [`manager`], [`launch`], [`collectives`] | ranks, launchers, groups and communication |
//! | [`config`] | layers of configuration: files, environment variables, overrides |
//! | [`torch`], [`tch`] | libtorch |
//! | [`serde`], [`schemars`] | for the configuration of a model: `#[serde(crate = "isobar::serde")]` |
//!
//! A program that shards a field, on 1 or N ranks:
//!
//! ```
//! use isobar::prelude::*;
//!
//! fn main() -> std::process::ExitCode {
//!     isobar::main(run)
//! }
//!
//! fn run() -> Result<(), BoxError> {
//!     let manager = DistributedManager::initialize()?; // mpirun, srun, torchrun, or alone
//!     let field = Tensor::f_ones([1, 4, 721, 16], (Kind::Float, Device::Cpu))?;
//!     let x = ShardTensor::distribute(&field, &manager.global_mesh(), &[Placement::Shard(2)])?;
//!     assert_eq!(x.gelu()?.shape(), [1, 4, 721, 16]);
//!     Ok(DistributedManager::cleanup(true)?)
//! }
//! ```
//!
//! Features, all on by default:
//!
//! | feature | with it |
//! |---|---|
//! | `app` | [`App`], the command line; `train` too |
//! | `train` | [`train`], [`data`], [`Trainer`]; needs HDF5 |
//! | `mpi` | ranks communicate over MPI, which is linked |
//! | `nccl` | GPUs communicate over NCCL, which is loaded if it is installed |
//!
//! A program that only needs the models (`default-features = false`) builds without any of these.

pub use isobar_array as array;
pub use isobar_collectives as collectives;
pub use isobar_config as config;
#[cfg(feature = "train")]
pub use isobar_data as data;
pub use isobar_files as files;
pub use isobar_launch as launch;
pub use isobar_manager as manager;
pub use isobar_mesh as mesh;
pub use isobar_models as models;
pub use isobar_nn as nn;
pub use isobar_shard as shard;
pub use isobar_torch as torch;
#[cfg(feature = "train")]
pub use isobar_train as train;
pub use {schemars, serde, tch};

#[cfg(feature = "app")]
pub use isobar_app::App;
#[cfg(not(feature = "train"))]
pub use isobar_manager::main;
#[cfg(feature = "train")]
pub use isobar_train::{Trainer, main};

/// The types that most programs use, and the methods of all operators.
///
/// Import further names of [`array`](mod@crate::array) one by one: some of them, such as `Window` and `Spectral`, are those of other
/// types in [`train`](mod@crate::train), too.
///
/// ```
/// use isobar::array::FftNorm;
/// use isobar::prelude::*;
///
/// let x = Tensor::f_zeros([2, 3], (Kind::Float, Device::Cpu))?;
/// assert_eq!(Elementwise::gelu(&x)?.size(), [2, 3]);
/// assert_eq!(x.rfftn(&[], &[0, 1], FftNorm::Backward)?.size(), [2, 2]);
/// assert_eq!(Tensor::op("clamp", &[&x], &args!("min": 1.0)())?[0], x + 1.0);
/// # Ok::<(), BoxError>(())
/// ```
pub mod prelude {
    pub use isobar_array::{Array, Conv, Elementwise, Generator, PadMode, Padding, Pool, args};
    // The methods of all operators; their traits have names that other types have, too.
    #[doc(no_inline)]
    pub use isobar_array::{
        Attention as _, Convert as _, Factory as _, Index as _, Linear as _, Local as _, Neighbours as _,
        RandomOps as _, Reduce as _, Resample as _, Shape as _, Spectral as _, Windowed as _,
    };
    pub use isobar_collectives::{Group, ReduceOp};
    #[cfg(feature = "train")]
    pub use isobar_data::{InMemory, Normalizer};
    pub use isobar_manager::{BoxError, DeviceMesh, DistributedManager};
    pub use isobar_models::{Batch, Mode, Model};
    pub use isobar_nn as nn;
    pub use isobar_shard::{Init, MeshParams, Parallel, ParamStore, Params, Placement, Scope, ShardTensor};
    #[cfg(feature = "train")]
    pub use isobar_train::loss::{Huber, LossKind, Mae, Mse, RelativeL2, Sobolev, Spectral as SpectralLoss};
    #[cfg(feature = "train")]
    pub use isobar_train::optim::{AdamConfig, AdamWConfig, LionConfig, MuonConfig, SgdConfig};
    #[cfg(feature = "train")]
    pub use isobar_train::schedule::{Constant, Cosine, ScheduleKind};
    #[cfg(feature = "train")]
    pub use isobar_train::{FitConfig, Precision, Registered, Trainer, Variable, Window, Windows};
    pub use tch::{Device, Kind, Tensor};
}
