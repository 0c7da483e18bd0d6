//! What a model does to a tensor.
//!
//! [`Array`] is the whole of it, split by subject into the traits that it is made of. Models are written once over it and
//! run on whatever implements it: here `tch::Tensor`, one rank's dense tensor. Every method returns a `Result`; shapes are
//! those of the global tensor; index tensors are arrays too; operators that draw random numbers take a
//! [`Generator`](crate::Generator).

mod convert;
mod elementwise;
pub(crate) mod fourier;
mod linear;
mod local;
mod make;
mod modes;
mod parallel;
mod random;
mod reduce;
mod registry;
mod shape;
mod spectral;
mod tables;
mod windowed;

use std::fmt::Debug;

use tch::{Device, Kind, TchError, Tensor};

pub use convert::Convert;
pub(crate) use convert::as_complex;
pub use elementwise::{Binary, Elementwise, Unary};
pub use linear::{Conv2d, Linear};
pub use local::Local;
pub use make::Make;
pub use parallel::Parallel;
pub use random::RandomOps;
pub use reduce::{Reduce, Reduction};
pub(crate) use registry::is_registered;
pub use registry::{Attrs, register_op, registered_ops};
pub use shape::Shape;
pub(crate) use spectral::points_like;
pub use spectral::{FftNorm, Modes, Spectral};
pub use windowed::Windowed;

use crate::error::{Error, Result};

/// A tensor as models see it.
pub trait Array:
    Convert
    + Elementwise
    + Linear
    + Make
    + Reduce
    + Shape
    + Spectral
    + Windowed
    + RandomOps
    + Parallel
    + Local
    + Debug
    + Send
    + Sized
    + 'static
{
    /// Shape of the global tensor.
    fn shape(&self) -> Vec<i64>;

    /// Kind of the elements.
    fn kind(&self) -> Kind;

    /// Where the elements are.
    fn device(&self) -> Device;

    /// The extent of `dim`, which may count from the end (−1 is the last).
    ///
    /// # Errors
    ///
    /// There is no such dim.
    fn extent(&self, dim: i64) -> Result<i64> {
        let shape = self.shape();
        Ok(shape[resolve("extent", dim, shape.len())?])
    }

    /// Runs the operator that [`register_op`] put under `name`.
    ///
    /// # Errors
    ///
    /// Nobody registered the name, or the operator fails.
    fn op(name: &str, inputs: &[&Self], attrs: &Attrs) -> Result<Vec<Self>>;
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

/// `dim` counted from the front, for a tensor of `dims` dims.
pub(crate) fn resolve(op: &'static str, dim: i64, dims: usize) -> Result<usize> {
    let from_front = if dim < 0 { dim + dims as i64 } else { dim };
    if (0..dims as i64).contains(&from_front) {
        return Ok(from_front as usize);
    }
    Err(argument(op, format!("dim {dim} of a tensor with {dims} dims")))
}

pub(crate) fn argument(op: &'static str, reason: impl Into<String>) -> Error {
    Error::Argument { op, reason: reason.into() }
}

/// Names the operator and its tensors in what libtorch refuses.
pub(crate) fn named<T>(op: &'static str, tensors: &[&Tensor], result: Result<T, TchError>) -> Result<T> {
    result.map_err(|source| {
        let shapes: Vec<String> =
            tensors.iter().map(|tensor| format!("{:?} {:?}", Tensor::kind(tensor), tensor.size())).collect();
        Error::Operator { op, shapes: shapes.join(", "), source: first_line(source) }
    })
}

/// libtorch appends its C++ stack to the message.
fn first_line(error: TchError) -> TchError {
    match error {
        TchError::Torch(text) => {
            let end = text.find("\nException raised from").unwrap_or(text.len());
            TchError::Torch(text[..end].trim_end().to_string())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
