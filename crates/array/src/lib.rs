//! Arrays that models are written over: [`Array`] with its implementation for `tch::Tensor`, the options of its operators, random
//! numbers that belong to the global tensor, mixed precision and recomputation. This crate knows no rank, no layout and no
//! communication.
//!
//! - [`Array`]: the operators that models call, split by subject into traits; [`register_op`] adds operators by name.
//! - [`Conv`], [`Pool`], [`Resize`], [`PadMode`], …: options of operators.
//! - [`Generator`]: Philox random numbers; [`Window`] is the part of the global tensor that a rank draws.
//! - [`recompute`]: activation checkpointing. [`in_full_precision`]: a region without autocast.
//! - [`periodic`]: calculus on periodic fields.
//! - [`kernel`]: dense kernels and checks of arguments, on which sharded operators build.
//!
//! ```
//! use isobar_array::{Array, Conv, Padding, Windowed};
//! use tch::{Device, Kind, Tensor};
//!
//! fn smooth<A: Array>(x: &A, weight: &A) -> isobar_array::Result<A> {
//!     x.conv(weight, None, &Conv { padding: Padding::Each(vec![1]), ..Conv::default() })
//! }
//! let x = Tensor::ones([1, 1, 6, 8], (Kind::Float, Device::Cpu));
//! let y = smooth(&x, &(Tensor::ones([1, 1, 3, 3], (Kind::Float, Device::Cpu)) / 9.0))?;
//! assert_eq!(y.size(), [1, 1, 6, 8]);
//! # Ok::<(), isobar_array::Error>(())
//! ```

/// Arguments of an operator by PyTorch's names, made lazily: `args!("dim": 1)()` is an [`Attrs`]. A value is what `serde_json::json!`
/// takes: a number, a string, a bool, a list, or an expression of a type that serde serializes.
///
/// ```
/// use isobar_array::args;
///
/// let kernel = 3;
/// let args = args!("padding": [kernel / 2, 0], "groups": 1)();
/// assert_eq!((&args["padding"][0], &args["groups"]), (&1.into(), &1.into()));
/// ```
#[macro_export]
macro_rules! args {
    ($($name:literal: $value:expr),* $(,)?) => {
        || $crate::Attrs::from_iter([$(($name.to_owned(), $crate::serde_json::json!($value))),*])
    };
}

#[doc(hidden)]
pub use {inventory, serde_json};

mod array;
mod dtypes;
mod error;
pub mod periodic;
mod precision;
pub mod random;
mod recompute;
mod registry;
mod windowed;

pub use array::{
    Array, Attention, AttentionOptions, AttentionStrategy, Binary, Comparison, Conv2d, Convert, Elementwise,
    Factory, FftNorm, GridSample, Index, Linear, Local, Modes, Neighbours, OnShard, RandomOps, Reduce,
    Reduction, Resample, RunningStats, SamplePadding, Shape, Spectral, Statistic, Unary, Windowed,
};
pub use error::{Error, Result};
pub use precision::in_full_precision;
pub use random::{Generator, Window};
pub use recompute::{Surroundings, is_recomputing, recompute, recomputed_calls};
pub use registry::{Attrs, register_op, registered_ops};
pub use windowed::{Conv, Interpolation, PadMode, Padding, Pool, Resize};

/// Dense kernels and checks of arguments, on which other implementations of [`Array`] build.
pub mod kernel {
    pub use crate::array::fourier::{Kind, Transform};
    pub use crate::array::{
        as_complex, broadcast_to, check_picks, distances, from_rows, number, on_device, points_like,
        query_tiles, resolve, rows_at, smallest, tile_boundaries,
    };
    pub use crate::dtypes::{Dtype, check_dtypes, check_number, least};
    pub use crate::error::{argument, named, refuse};
    pub use crate::precision::{Inside, full, full_kind, lowered, lowered_kind};
    #[doc(hidden)]
    pub use crate::registry::Provider;
    pub use crate::registry::is_registered;
    pub use crate::windowed::{
        Around, ConvParams, Grid, Rest, Shapes, Taps, WindowGeometry, along, average, check_dims, cut_like,
        each, interpolated, maxima, means, nonempty, spatial_dims, spatial_name, to_bytes, values,
    };
}
