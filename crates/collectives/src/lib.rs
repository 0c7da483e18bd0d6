//! Collective communication of tensors, each collective a linear map with its adjoint.
//!
//! - [`Group`]: an ordered set of ranks, over threads of one process ([`threads`]), MPI ([`mpi`]) or gloo ([`gloo`]); CUDA
//!   tensors go over NCCL ([`nccl`]) where it is attached, else through pinned host memory.
//! - The functions of the root wait and are differentiable; those of [`start`] are asynchronous and give [`Work`].
//! - [`copy_to_parallel_region`] and its three companions pair global tensors, for models that are split over ranks.
//! - [`windows`] brings each rank the indices that it needs of a sharded tensor.
//! - [`trace`] records what is communicated, by operation, group and module.
//! - [`flight`] keeps the last operations of every rank, for when one is lost.
//! - [`LinearMap`] and [`differentiable`] make further maps differentiable in the same way.
//!
//! # Common rules
//!
//! All ranks of a group must call the same collectives in the same order. Arguments are checked before data are sent; a rank that
//! rejects its arguments notifies the others, so that all dependent ranks return an error. Every wait has the
//! group's deadline. Tensors may have any strides; channels-last stays channels-last; parts may be empty; inputs are
//! not changed. (On a group of one rank a result may be its input, and not a copy.) All dtypes are supported, since
//! elements are sent as bytes. Through host memory, a digest of operation, dtype and shape goes before each message. Reductions add in rank order, so
//! that all ranks, and all backends, get the same bits; NCCL's own reductions of CUDA tensors have its order, the same on all
//! ranks.
//!
//! ```
//! use isobar_collectives::{Group, all_gather_v};
//! use tch::Tensor;
//!
//! let group = Group::single();
//! let x = Tensor::from_slice(&[1.0, 2.0, 3.0]);
//! assert_eq!(all_gather_v(&x, None, 0, true, &group)?, x);
//! # Ok::<(), isobar_collectives::Error>(())
//! ```

mod backend;
mod collective;
mod engine;
mod error;
mod local;
mod observe;
mod wire;
mod world;

pub use collective::all_gather::{all_gather_v, reduce_scatter_v};
pub use collective::all_reduce::all_reduce;
pub use collective::all_to_all::{all_to_all_v, transpose};
pub use collective::broadcast::{broadcast, reduce};
pub use collective::fused::{Structure, fused_all_reduce};
pub use collective::gather::{gather_v, scatter_v};
pub use collective::helpers::{PadMode, pad, reduce_loss, truncate};
pub use collective::indexed::{indexed_all_to_all_v, indexed_scatter_add_v};
pub use collective::linear::{LinearMap, attach, differentiable};
pub use collective::regions::{
    copy_to_parallel_region, gather_from_parallel_region, reduce_from_parallel_region,
    scatter_to_parallel_region,
};
pub use collective::send_recv::send_recv;
pub use collective::shared::{SharedModule, SharedOptions, mark_module_as_shared, unmark_module_as_shared};
pub use collective::{start, trace, windows};
pub use engine::comparison::Fingerprints;
pub use engine::group::{Group, Traffic};
pub use engine::work::Work;
pub use error::{Error, Result, Site};
pub use local::reduce::ReduceOp;
pub use local::sizes::{balanced, chunk, compute_split_shapes};
pub use observe::flight;
pub use wire::BackendKind;
#[cfg(feature = "mpi")]
pub use world::mpi;
pub use world::{gloo, nccl, threads};
