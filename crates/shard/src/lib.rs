//! Arrays that models are written over, their parameters, and random numbers that do not depend on the layout.
//!
//! - [`Array`]: what a model does to a tensor; implemented by `tch::Tensor`. [`register_op`] adds operators by name.
//! - [`Params`]: the supplier of a model's parameters; [`ParamStore`] is one rank's, with its sharded ones split over a
//!   [`ParallelRegion`].
//! - [`ShardTensor`]: a global tensor of which each rank of a mesh has a part, by a [`Layout`]. [`rules`] adds operators of it.
//! - [`ParameterLayouts`]: a model's parameters, laid out by patterns of their names.
//! - [`CommTrace`]: what is communicated, by operation, group and [module](trace::module); [`visualize_sharding`]: which ranks hold
//!   which indices.
//! - [`checkpoint`]: computes a part of a model again in backward, where its memory is scarcer than time.
//! - [`Generator`]: Philox random numbers that belong to the global tensor; [`Window`] says which part a rank makes.
//!
//! This crate knows nothing of how ranks communicate, of files but safetensors, or of any particular model.

/// The arguments of an operator by PyTorch's names, made where a program's handler wants them.
macro_rules! args {
    ($($name:literal: $value:expr),* $(,)?) => {
        || crate::array::Attrs::from_iter([$(($name.to_owned(), serde_json::json!($value))),*])
    };
}

pub mod array;
mod checkpoint;
mod context;
mod error;
mod layout;
mod module;
mod ops;
pub mod params;
pub mod periodic;
mod precision;
mod promote;
pub mod random;
mod region;
pub mod rules;
mod tensor;
mod visualize;
mod window;

pub use array::{
    Array, Attrs, Binary, Conv2d, Convert, Elementwise, FftNorm, Linear, Local, Make, Modes, Parallel,
    RandomOps, Reduce, Reduction, Shape, Spectral, Unary, Windowed, register_op, registered_ops,
};
pub use checkpoint::{checkpoint, is_recomputing};
pub use context::{
    CurrentMesh, ForbidHiddenCommunication, Promotion, PromotionGuard, forbid_hidden_communication, promotion,
};
pub use error::{Error, Result};
pub use isobar_collectives::trace::{self, CommEvent, CommRecord, CommTrace};
pub use layout::{Interval, Layout, Placement, Sizes};
pub use module::{ParameterLayouts, Source};
pub use ops::attention::{AttentionOptions, AttentionStrategy, context_parallel};
pub use ops::elementwise::Comparison;
pub use ops::fourier::TransformPieces;
pub use ops::fourier::distributed::{DistributedIrfft2, DistributedRfft2};
pub use ops::neighbours::{Ball, LimitedBall};
pub use ops::norm::RunningStats;
pub use ops::reduce::Statistic;
pub use ops::windowed::{Conv, Interpolation, PadMode, Padding, Pool, Resize};
pub use params::{
    GradientSource, GradientState, Init, MeshParams, MeshShard, ModelSize, ParamCount, ParamStore, Parameter,
    ParameterWatch, Params, Scope, StateDict, read_safetensors,
};
pub use precision::in_full_precision;
pub use promote::{Beside, Operand};
pub use random::{Generator, Window};
pub use region::ParallelRegion;
pub use tensor::{Pending, Redistribute, ShardTensor, grad};
pub use visualize::{ShardingView, visualize_sharding};
