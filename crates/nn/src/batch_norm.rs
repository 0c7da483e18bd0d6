//! Batch norm with its running statistics.

use isobar_array::{Array, RunningStats, is_recomputing};
use isobar_shard::{Init, Params, Placement, Result};

use crate::check::{extent, refuse};
use crate::layer::Layer;
use crate::mode::Mode;
use crate::norm::{EPS, affine};

/// Batch norm: each channel over the batch and all points (`torch.nn.BatchNorm1d` to `3d`): Ioffe and Szegedy,
/// arXiv:1502.03167.
///
/// Training normalizes with the statistics of the global batch, over all ranks of sharded arrays, and moves the running
/// statistics towards them by `momentum`; evaluation uses the running ones.
///
/// Shapes: input and output `[batch, num_features, extents…]`. State dict: `weight`, `bias`, `running_mean`, `running_var`
/// `[num_features]`, 1, 0, 0 and 1 at first. PyTorch's further `num_batches_tracked` is not there.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{BatchNorm, Mode};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let norm = BatchNorm::new(3, &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::rand([4, 3, 5], (Kind::Float, Device::Cpu));
/// let y = norm.forward(&x, Mode::train(&Generator::new(2)))?;
/// assert!(y.mean(Kind::Float).double_value(&[]).abs() < 1e-5);
/// assert_eq!(norm.forward(&x, Mode::Eval)?.size(), [4, 3, 5]);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct BatchNorm<A> {
    affine: Option<(A, A)>,
    mean: A,
    var: A,
    eps: f64,
    momentum: f64,
}

/// Options of [`BatchNorm`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNormOptions {
    /// Added to the variance.
    pub eps: f64,
    /// Weight of a batch's statistics in the running ones.
    pub momentum: f64,
    /// Has `weight` and `bias`.
    pub affine: bool,
}

impl Default for BatchNormOptions {
    fn default() -> Self {
        Self { eps: EPS, momentum: 0.1, affine: true }
    }
}

impl<A: Array> BatchNorm<A> {
    /// Makes a batch norm with PyTorch's defaults.
    ///
    /// # Errors
    ///
    /// `num_features` is below 1, or a parameter that `params` refuses.
    pub fn new(num_features: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        Self::with_options(num_features, BatchNormOptions::default(), params)
    }

    /// Makes a batch norm with options.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with_options(
        num_features: i64,
        options: BatchNormOptions,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let features = [extent("BatchNorm", "num_features", num_features)?];
        let affine = if options.affine { Some(affine(&features, params)?) } else { None };
        let mut running =
            |name, value| params.buffer(name, &features, Init::Constant(value), Placement::Replicate);
        let mean = running("running_mean", 0.0)?;
        let var = running("running_var", 1.0)?;
        Ok(Self { affine, mean, var, eps: options.eps, momentum: options.momentum })
    }

    /// Normalizes `[batch, num_features, extents…]`. With sharded arrays all ranks call.
    ///
    /// # Errors
    ///
    /// Another number of channels; one value for each channel in training, whose variance is 0; or an exchange that fails.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_nn::{BatchNorm, Mode};
    /// use isobar_shard::ParamStore;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// let norm = BatchNorm::new(1, &mut store)?;
    /// let x = Tensor::ones([4, 1, 5], (Kind::Float, Device::Cpu)) * 10.0;
    /// norm.forward(&x, Mode::train(&Generator::new(2)))?;
    /// // A tenth of the way from 0 to the mean of the batch.
    /// assert!((store.state_dict()?["running_mean"].double_value(&[0]) - 1.0).abs() < 1e-6);
    /// # Ok::<(), isobar_nn::Error>(())
    /// ```
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let (weight, bias) = self.affine.as_ref().map(|(weight, bias)| (weight, bias)).unzip();
        let running = RunningStats { mean: &self.mean, var: &self.var, momentum: self.momentum };
        let training = mode.is_training();
        let shape = x.shape();
        let is_lone = shape.iter().enumerate().all(|(dim, &extent)| dim == 1 || extent == 1);
        if training && is_lone {
            return refuse(
                "BatchNorm",
                format!(
                    "{shape:?} has one value for each channel, expected more in training: take larger batches or fields, or another \
                     normalization"
                ),
            );
        }
        // A batch whose activations are recomputed counts once.
        let running = (!training || !is_recomputing()).then_some(running);
        Ok(x.batch_norm(weight, bias, running, training, self.eps)?)
    }
}

impl<A: Array> Layer<A> for BatchNorm<A> {
    fn apply(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.forward(x, mode)
    }
}
