//! Arrays that models are written over, their parameters, and random numbers that do not depend on the layout.
//!
//! - [`Array`]: what a model does to a tensor; implemented by `tch::Tensor`. [`register_op`] adds operators by name.
//! - [`Params`]: the supplier of a model's parameters; [`ParamStore`] is one rank's, with its sharded ones split over a
//!   [`ParallelRegion`].
//! - [`Generator`]: Philox random numbers that belong to the global tensor; [`Window`] says which part a rank makes.
//!
//! This crate knows nothing of how ranks communicate, of files but safetensors, or of any particular model.

pub mod array;
mod error;
pub mod params;
pub mod random;
mod region;

pub use array::{
    Array, Attrs, Binary, Conv2d, Convert, Elementwise, FftNorm, Linear, Modes, Parallel, RandomOps, Reduce,
    Reduction, Shape, Spectral, Unary, register_op, registered_ops,
};
pub use error::{Error, Result};
pub use params::{Init, ParamStore, Parameter, Params, Placement, Scope, StateDict, read_safetensors};
pub use random::{Generator, Window};
pub use region::ParallelRegion;
