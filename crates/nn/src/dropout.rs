//! Dropout and stochastic depth.

use isobar_array::Array;
use isobar_shard::Result;

use crate::check::probability;
use crate::layer::Layer;
use crate::mode::{Mode, Part};

/// Zeroes each element with probability `p` in training and scales the others by 1 / (1 − p) (`torch.nn.Dropout`).
///
/// The mask belongs to the global tensor: it is the same on any number of ranks. The batch is dim 0.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{Dropout, Mode};
/// use tch::{Device, Kind, Tensor};
///
/// let dropout = Dropout::new(0.5)?;
/// let x = Tensor::ones([4, 100], (Kind::Float, Device::Cpu));
/// assert_eq!(dropout.forward(&x, Mode::Eval)?, x);
/// let y = dropout.forward(&x, Mode::train(&Generator::new(1)))?;
/// assert_eq!(y.eq(0.0).logical_or(&y.eq(2.0)).all(), Tensor::from(true));
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    p: f64,
}

impl Dropout {
    /// Makes the layer; PyTorch's default is 0.5.
    ///
    /// # Errors
    ///
    /// `p` is outside [0, 1).
    pub fn new(p: f64) -> Result<Self> {
        Ok(Self { p: probability("Dropout", "p", p)? })
    }

    /// Drops elements of `x` `[batch, …]` in training; returns `x` in evaluation.
    ///
    /// # Errors
    ///
    /// A mode whose part of the batch has another number of samples.
    pub fn forward<A: Array>(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.forward_parts(x, mode, 0, &[])
    }

    /// Drops elements of `x`, whose batch is dim `batch_dim` and whose dims in `parts` are parts of global ones.
    ///
    /// # Errors
    ///
    /// Parts that do not fit the shape.
    pub fn forward_parts<A: Array>(
        &self,
        x: &A,
        mode: Mode<'_>,
        batch_dim: usize,
        parts: &[Part],
    ) -> Result<A> {
        mode.dropout(x, self.p, batch_dim, parts)
    }
}

impl<A: Array> Layer<A> for Dropout {
    fn apply(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.forward(x, mode)
    }
}

/// Stochastic depth: drops whole samples of a residual branch (`torchvision.ops.StochasticDepth`): Huang et al., ECCV 2016.
///
/// ```
/// use isobar_nn::{DropPath, Mode};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([4, 10], (Kind::Float, Device::Cpu));
/// assert_eq!(DropPath::new(0.1)?.forward(&x, Mode::Eval)?, x);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropPath {
    p: f64,
}

impl DropPath {
    /// Makes the layer.
    ///
    /// # Errors
    ///
    /// `p` is outside [0, 1).
    pub fn new(p: f64) -> Result<Self> {
        Ok(Self { p: probability("DropPath", "p", p)? })
    }

    /// Drops samples of `x` `[batch, …]` in training; returns `x` in evaluation.
    ///
    /// # Errors
    ///
    /// A mode whose part of the batch has another number of samples.
    pub fn forward<A: Array>(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        mode.drop_path(x, self.p, 0)
    }
}

impl<A: Array> Layer<A> for DropPath {
    fn apply(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.forward(x, mode)
    }
}
