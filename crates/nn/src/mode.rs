//! Training or evaluation.

use isobar_array::{Array, Generator, Window};
use isobar_shard::Result;

/// Purpose of a pass.
#[derive(Debug, Clone, Copy, Default)]
pub enum Mode<'a> {
    /// Evaluation: nothing is random, and batch norm takes its running statistics.
    #[default]
    Eval,
    /// Training: dropout and drop-path draw from the generator, in the same order on every rank, and batch
    /// norm takes the statistics of the batch.
    Train {
        /// The random numbers, in the same state on every rank.
        generator: &'a Generator,
        /// Samples of the global batch that this rank has; `None` means all of them.
        batch: Option<BatchPart>,
    },
}

/// A rank's samples among those of the global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPart {
    /// Place of the rank's first sample in the global batch.
    pub offset: i64,
    /// Number of samples of the global batch.
    pub total: i64,
}

impl<'a> Mode<'a> {
    /// Training on a batch that this rank has whole.
    pub fn train(generator: &'a Generator) -> Self {
        Mode::Train { generator, batch: None }
    }

    /// Training on the part of the global batch of `total` samples that begins at `offset`.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_nn::{Dropout, Mode};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // Samples 2 and 3 of a batch of 4 are dropped alike on any number of ranks.
    /// let (dropout, x) = (Dropout::new(0.5)?, Tensor::ones([4, 100], (Kind::Float, Device::Cpu)));
    /// let all = dropout.forward(&x, Mode::train(&Generator::new(1)))?;
    /// let part = dropout.forward(&x.narrow(0, 2, 2), Mode::train_part(&Generator::new(1), 2, 4))?;
    /// assert_eq!(part, all.narrow(0, 2, 2));
    /// # Ok::<(), isobar_nn::Error>(())
    /// ```
    pub fn train_part(generator: &'a Generator, offset: i64, total: i64) -> Self {
        Mode::Train { generator, batch: Some(BatchPart { offset, total }) }
    }

    /// Returns true in training.
    pub fn is_training(&self) -> bool {
        matches!(self, Mode::Train { .. })
    }

    /// Drops elements of `x`, whose dims named in `parts` are parts of global ones; the batch is dim `batch_dim`.
    ///
    /// # Errors
    ///
    /// `p` is outside [0, 1), or parts that do not fit the shape.
    pub fn dropout<A: Array>(&self, x: &A, p: f64, batch_dim: usize, parts: &[Part]) -> Result<A> {
        let shape: Vec<Option<i64>> = vec![None; x.shape().len()];
        self.drop(x, p, batch_dim, parts, &shape)
    }

    /// Drops samples of `x` (Huang et al., *Deep networks with stochastic depth*, ECCV 2016).
    ///
    /// # Errors
    ///
    /// See [`dropout`](Self::dropout).
    pub fn drop_path<A: Array>(&self, x: &A, p: f64, batch_dim: usize) -> Result<A> {
        let mut shape = vec![Some(1); x.shape().len()];
        shape[batch_dim] = None;
        self.drop(x, p, batch_dim, &[], &shape)
    }

    /// Draws uniform numbers in [0, 1) with the shape, dtype and layout of `like`, without a gradient: each sample (along
    /// `batch_dim`) gets its numbers of the global batch. Returns `None` in evaluation.
    ///
    /// # Errors
    ///
    /// The dtype is not floating point, or the part of the batch does not fit.
    pub fn uniform<A: Array>(&self, like: &A, batch_dim: usize) -> Result<Option<A>> {
        let Mode::Train { generator, batch } = *self else { return Ok(None) };
        let window = global_window(&like.shape(), batch.map(|part| part.of_dim(batch_dim)), &[])?;
        Ok(Some(like.uniform_like(generator, &window)?))
    }

    fn drop<A: Array>(
        &self,
        x: &A,
        p: f64,
        batch_dim: usize,
        parts: &[Part],
        mask_shape: &[Option<i64>],
    ) -> Result<A> {
        let Mode::Train { generator, batch } = *self else { return Ok(x.shallow_clone()) };
        if p == 0.0 {
            return Ok(x.shallow_clone());
        }
        let own: Vec<i64> =
            x.shape().iter().zip(mask_shape).map(|(&extent, mask)| mask.unwrap_or(extent)).collect();
        let window = global_window(&own, batch.map(|part| part.of_dim(batch_dim)), parts)?;
        Ok(x.dropout(p, generator, &window)?)
    }
}

impl BatchPart {
    fn of_dim(self, dim: usize) -> Part {
        Part { dim, offset: self.offset, total: self.total }
    }
}

/// Returns the window that an array of shape `own` has in the global array.
fn global_window(own: &[i64], batch: Option<Part>, parts: &[Part]) -> Result<Window> {
    let mut global = own.to_vec();
    for part in parts.iter().chain(&batch) {
        global[part.dim] = part.total;
    }
    let mut window = Window::whole(&global);
    for part in parts.iter().chain(&batch) {
        window = window.narrow(part.dim, part.offset, own[part.dim])?;
    }
    Ok(window)
}

/// A dim of which this rank holds a part.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The dim.
    pub dim: usize,
    /// Global index of the rank's first element.
    pub offset: i64,
    /// Extent of the global tensor.
    pub total: i64,
}
