//! Constructors of arrays like others.

use tch::{Kind, Tensor};

use super::{named, resolve};
use crate::error::Result;

/// Constructors of arrays with the dtype, device and placement of another array.
pub trait Factory: Sized {
    /// As many numbers as this array has along `dim`, evenly from `start` to `end`, both included, as an array of that one
    /// dim, which lies as `dim` does; a single number is `start`. They are computed in double precision.
    ///
    /// # Errors
    ///
    /// There is no such dim.
    ///
    /// ```
    /// use isobar_array::Factory;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // Latitudes of the rows of a field [batch, channel, height, width].
    /// let field = Tensor::zeros([1, 2, 5, 8], (Kind::Double, Device::Cpu));
    /// let latitudes = field.linspace_along(2, 90.0, -90.0)?;
    /// assert_eq!(latitudes, Tensor::from_slice(&[90.0, 45.0, 0.0, -45.0, -90.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn linspace_along(&self, dim: i64, start: f64, end: f64) -> Result<Self>;
}

impl Factory for Tensor {
    fn linspace_along(&self, dim: i64, start: f64, end: f64) -> Result<Self> {
        const OP: &str = "linspace";
        let shape = self.size();
        let count = shape[resolve(OP, dim, shape.len())?];
        let values = Tensor::f_linspace(start, end, count, (Kind::Double, Tensor::device(self)));
        named(OP, &[self], values.and_then(|values| values.f_to_kind(Tensor::kind(self))))
    }
}
