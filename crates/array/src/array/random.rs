//! Operators that draw random numbers.

use tch::Tensor;

use super::{argument, named};
use crate::error::Result;
use crate::random::{Generator, Window};

/// Dropout and its relatives.
pub trait RandomOps: Sized {
    /// Each element zero with probability `p`, else times 1 / (1 − p). `window` says which part of the global tensor this
    /// array is, so that the result does not depend on the layout. `p` = 0 draws nothing.
    ///
    /// # Errors
    ///
    /// `p` is outside [0, 1], or `window` has another shape than the array.
    ///
    /// ```
    /// use isobar_array::{Generator, RandomOps, Window};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::ones([4, 6], (Kind::Double, Device::Cpu));
    /// let y = RandomOps::dropout(&x, 0.5, &Generator::new(7), &Window::whole(&[4, 6]))?;
    /// assert!(y.eq(0.0).logical_or(&y.eq(2.0)).all().int64_value(&[]) == 1);
    /// // A window of extent 1 along a dim drops all elements along it at once, as dropout of channels does.
    /// let rows = RandomOps::dropout(&x, 0.5, &Generator::new(7), &Window::whole(&[4, 1]))?;
    /// assert_eq!(rows.amax([1], false), rows.amin([1], false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn dropout(&self, p: f64, generator: &Generator, window: &Window) -> Result<Self>;

    /// Draws standard normal numbers for an array of this shape, dtype and layout, without a gradient. `window` says which part of
    /// the global tensor this array is, so that the numbers do not depend on the layout. One draw of the generator.
    ///
    /// # Errors
    ///
    /// A dtype that is not floating, or `window` has another shape than the array.
    ///
    /// ```
    /// use isobar_array::{Generator, RandomOps, Window};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let like = Tensor::zeros([4, 6], (Kind::Float, Device::Cpu));
    /// let noise = like.normal_like(&Generator::new(7), &Window::whole(&[4, 6]))?;
    /// let rows = Window::whole(&[4, 6]).narrow(0, 2, 2)?;
    /// assert_eq!(like.narrow(0, 2, 2).normal_like(&Generator::new(7), &rows)?, noise.narrow(0, 2, 2));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn normal_like(&self, generator: &Generator, window: &Window) -> Result<Self>;

    /// Draws uniform numbers in [0, 1), otherwise as [`normal_like`](Self::normal_like).
    ///
    /// # Errors
    ///
    /// See [`normal_like`](Self::normal_like).
    ///
    /// ```
    /// use isobar_array::{Generator, RandomOps, Window};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let like = Tensor::zeros([4, 6], (Kind::Float, Device::Cpu));
    /// let noise = like.uniform_like(&Generator::new(7), &Window::whole(&[4, 6]))?;
    /// assert!(noise.min().double_value(&[]) >= 0.0 && noise.max().double_value(&[]) < 1.0);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn uniform_like(&self, generator: &Generator, window: &Window) -> Result<Self>;
}

/// Checks that the array has the shape of the window.
fn check_window(op: &'static str, like: &Tensor, window: &Window) -> Result<()> {
    if like.size() == window.shape() {
        return Ok(());
    }
    let reason = format!("window of shape {:?}; expected the array's {:?}", window.shape(), like.size());
    Err(argument(op, reason))
}

impl RandomOps for Tensor {
    fn dropout(&self, p: f64, generator: &Generator, window: &Window) -> Result<Self> {
        let shape = self.size();
        // A window of extent 1 along a dim drops everything along it at once.
        let fits = shape.len() == window.shape().len()
            && shape.iter().zip(window.shape()).all(|(&extent, &mask)| extent == mask || mask == 1);
        if !fits {
            let reason = format!("window {:?} does not cover an array {shape:?}", window.shape());
            return Err(argument("dropout", reason));
        }
        if p == 0.0 {
            return Ok(Tensor::shallow_clone(self));
        }
        let mask = generator.dropout_mask(window, p, (Tensor::kind(self), Tensor::device(self)))?;
        named("dropout", &[self, &mask], self.f_mul(&mask))
    }

    fn normal_like(&self, generator: &Generator, window: &Window) -> Result<Self> {
        check_window("normal_like", self, window)?;
        generator.normal(window, 0.0, 1.0, (Tensor::kind(self), Tensor::device(self)))
    }

    fn uniform_like(&self, generator: &Generator, window: &Window) -> Result<Self> {
        check_window("uniform_like", self, window)?;
        generator.uniform(window, 0.0, 1.0, (Tensor::kind(self), Tensor::device(self)))
    }
}
