//! Sharded tensors: layouts, redistribution, the operators of [`ShardTensor`], and the supplier of a model's parameters on a mesh.
//! This crate never names a backend or a device, reads no environment or configuration, and knows no particular model.
//!
//! - [`ShardTensor`]: a global tensor of which each rank of a mesh has a shard, by a [`Layout`]. It implements
//!   [`isobar_array::Array`]. [`register!`] adds operators of it, [`rules`] has all of them.
//! - [`Params`]: the supplier of a model's parameters; [`ParamStore`] is one rank's, with its sharded ones split over a
//!   [`ParallelRegion`].
//! - [`ParameterLayouts`]: a model's parameters, laid out by patterns of their names.
//! - [`CommTrace`]: what is communicated, by operation, group and [module](trace::module); [`visualize_sharding`]: which ranks hold
//!   which indices.
//! - [`checkpoint`]: recomputes a part of a model in backward.

/// Arguments of an operator by PyTorch's names, for [`ShardTensor::op`](isobar_array::Array::op): see
/// [`isobar_array::args!`](macro@isobar_array::args).
#[macro_export]
macro_rules! args {
    ($($given:tt)*) => { $crate::isobar_array::args!($($given)*) };
}

#[doc(hidden)]
pub use {inventory, isobar_array};

mod array;
mod checkpoint;
mod context;
mod dense;
mod error;
mod layout;
mod ops;
mod parallel;
pub mod params;
mod promote;
mod region;
pub mod rules;
mod tensor;
mod visualize;
mod window;

pub use checkpoint::checkpoint;
pub use context::{
    CurrentMesh, ForbidHiddenCommunication, Promotion, PromotionGuard, forbid_hidden_communication, promotion,
};
pub use error::{Error, Result};
pub use isobar_collectives::trace::{self, CommEvent, CommRecord, CommTrace};
pub use layout::{Interval, Layout, Placement, Sizes};
pub use ops::attention::{AttentionOptions, context_parallel};
pub use ops::fourier::TransformPieces;
pub use ops::fourier::distributed::{DistributedIrfft2, DistributedRfft2};
pub use ops::neighbours::{Ball, LimitedBall};
pub use parallel::Parallel;
pub use params::{
    BufferValues, ComputedBuffer, GradientSource, GradientState, Init, MeshParams, MeshShard, ModelSize,
    ParamCount, ParamStore, Parameter, ParameterLayouts, ParameterWatch, Params, Scope, Source, StateDict,
    read_safetensors,
};
pub use promote::{OnMesh, Operand};
pub use region::ParallelRegion;
pub use tensor::{Pending, Redistribute, ShardTensor, grad};
pub use visualize::{ShardingView, visualize_sharding};
