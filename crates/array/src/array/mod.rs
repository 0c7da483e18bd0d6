//! The trait of tensor operations that models use, [`Array`], and its implementation for `tch::Tensor`.
//!
//! [`Array`] is the whole of it, split by subject into the traits that it is made of. Models are written once over it and
//! run on whatever implements it: here `tch::Tensor`, one rank's dense tensor. Every method returns a `Result`; shapes are
//! those of the global tensor; index tensors are arrays too; operators that draw random numbers take a
//! [`Generator`](crate::Generator).
//!
//! Nothing here depends on ranks.

mod attention;
mod by_name;
mod convert;
mod elementwise;
mod fields;
pub(crate) mod fourier;
mod index;
mod linear;
mod local;
mod make;
mod modes;
mod neighbours;
mod random;
mod reduce;
mod resample;
mod rows;
mod shape;
mod spectral;
mod tables;
mod transforms;

use std::fmt::Debug;

use tch::{Device, Kind, Tensor};

pub use attention::{Attention, AttentionOptions, AttentionStrategy};
pub use convert::Convert;
pub use convert::{as_complex, on_device};
pub use elementwise::{Binary, Comparison, Elementwise, Unary};
pub use fields::{RunningStats, Windowed};
pub use index::Index;
pub use linear::{Conv2d, Linear};
pub use local::{Local, OnShard, broadcast_to, tile_boundaries};
pub use make::Factory;
pub use neighbours::{Neighbours, distances, query_tiles, smallest};
pub use random::RandomOps;
pub use reduce::{Reduce, Reduction, Statistic};
pub use resample::{GridSample, Resample, SamplePadding};
pub use rows::{check_picks, from_rows, rows_at};
pub use shape::Shape;
pub use spectral::points_like;
pub use spectral::{Modes, Spectral};
pub use transforms::FftNorm;

pub(crate) use crate::error::{argument, named, refuse};
pub(crate) use crate::registry::Attrs;

use crate::error::Result;
use crate::registry;

/// A tensor as models see it.
pub trait Array:
    Attention
    + Convert
    + Elementwise
    + Index
    + Linear
    + Factory
    + Neighbours
    + Reduce
    + Shape
    + Spectral
    + Windowed
    + RandomOps
    + Local
    + Debug
    + Send
    + Sized
    + 'static
{
    /// Shape of the global tensor.
    ///
    /// ```
    /// use isobar_array::Array;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// /// The mean square, from the number of elements of the global tensor.
    /// fn mean_square<A: Array>(x: &A) -> isobar_array::Result<A> {
    ///     let count: i64 = x.shape().iter().product();
    ///     x.mul(x)?.sum()?.mul_scalar(1.0 / count as f64)
    /// }
    /// let x = Tensor::ones([2, 3], (Kind::Double, Device::Cpu)) * 2.0;
    /// assert_eq!(mean_square(&x)?.double_value(&[]), 4.0);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn shape(&self) -> Vec<i64>;

    /// Kind of the elements.
    fn kind(&self) -> Kind;

    /// Returns the device of the elements.
    fn device(&self) -> Device;

    /// The extent of `dim`, which may count from the end (−1 is the last).
    ///
    /// # Errors
    ///
    /// There is no such dim.
    ///
    /// ```
    /// use isobar_array::Array;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([2, 3, 8], (Kind::Float, Device::Cpu));
    /// assert_eq!((x.extent(0)?, x.extent(-1)?), (2, 8));
    /// assert!(x.extent(3).is_err());
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn extent(&self, dim: i64) -> Result<i64> {
        let shape = self.shape();
        Ok(shape[resolve("extent", dim, shape.len())?])
    }

    /// Runs the operator `name` with PyTorch's names of arguments. On dense arrays, a handler of
    /// [`register_op`](crate::register_op) has priority over the operators of `isobar_shard::register!`.
    ///
    /// # Errors
    ///
    /// Nobody registered the name, an argument that the operator does not have, or the operator fails.
    ///
    /// ```
    /// use isobar_array::{Array, args, register_op};
    /// use tch::Tensor;
    ///
    /// register_op("scale_by", |inputs, attrs| {
    ///     let factor = attrs["factor"].as_f64().ok_or("factor is not a number")?;
    ///     Ok(vec![inputs[0].f_mul_scalar(factor)?])
    /// });
    /// let x = Tensor::from_slice(&[1.0, 2.0]);
    /// let y = Tensor::op("scale_by", &[&x], &args!("factor": 3.0)())?;
    /// assert_eq!(y[0], Tensor::from_slice(&[3.0, 6.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn op(name: &str, inputs: &[&Self], attrs: &Attrs) -> Result<Vec<Self>>;

    /// Runs the registered replacement of a composite operator; `None` if no replacement is registered.
    #[doc(hidden)]
    fn replaced(name: &str, inputs: &[&Self], attrs: impl FnOnce() -> Attrs) -> Option<Result<Self>> {
        let _ = (name, inputs, attrs);
        None
    }
}

impl Array for Tensor {
    fn shape(&self) -> Vec<i64> {
        self.size()
    }

    fn kind(&self) -> Kind {
        Tensor::kind(self)
    }

    fn device(&self) -> Device {
        Tensor::device(self)
    }

    fn op(name: &str, inputs: &[&Self], attrs: &Attrs) -> Result<Vec<Self>> {
        registry::run(name, inputs, attrs)
    }
}

/// Returns `dim` counted from the front, for a tensor of `dims` dims.
///
/// # Errors
///
/// There is no such dim.
///
/// ```
/// use isobar_array::kernel::resolve;
///
/// assert_eq!(resolve("sum", -1, 4)?, 3);
/// let error = resolve("sum", 4, 4).unwrap_err();
/// assert_eq!(error.to_string(), "sum: dim 4 of a tensor with 4 dims");
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn resolve(op: &'static str, dim: i64, dims: usize) -> Result<usize> {
    let from_front = if dim < 0 { dim + dims as i64 } else { dim };
    if (0..dims as i64).contains(&from_front) {
        return Ok(from_front as usize);
    }
    Err(argument(op, format!("dim {dim} of a tensor with {dims} dims")))
}

/// Returns a number as a named argument; infinities and NaN, which JSON lacks, by their names.
pub fn number(value: f64) -> serde_json::Value {
    match value {
        value if value.is_nan() => "nan".into(),
        f64::INFINITY => "inf".into(),
        f64::NEG_INFINITY => "-inf".into(),
        value => value.into(),
    }
}

#[cfg(test)]
mod tests;
