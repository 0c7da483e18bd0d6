//! What a run trains: a model with its data, as the engine sees it.

use std::ops::Range;

use isobar_data::{Augment, InMemory, Normalizer};
use isobar_shard::Generator;
use tch::Tensor;

use crate::error::Result;
use crate::loss::{Loss, relative_l2_errors};

/// An error of the code that a task calls.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Which step a loss is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The place of this rank's first sample in the global batch.
    pub offset: i64,
    /// The number of samples of the global batch.
    pub total: i64,
    /// This step's random numbers, in the same state on every rank.
    pub generator: &'a Generator,
}

/// A model and its data. The engine, [`fit`](crate::fit), says which samples a rank takes; the task turns them into
/// losses and errors. Samples of training and of validation are numbered from 0 each.
pub trait Task {
    /// Number of training samples.
    fn train_samples(&self) -> usize;

    /// Number of validation samples; 0 for none.
    fn validation_samples(&self) -> usize;

    /// The mean loss over these training samples, of which there is at least one, on the graph of the parameters.
    ///
    /// # Errors
    ///
    /// Whatever the model or the data reports.
    fn loss(&self, step: Step<'_>, samples: &[usize]) -> Result<Tensor, BoxError>;

    /// The error of each of these validation samples, of which there is at least one. Gradients are off.
    ///
    /// # Errors
    ///
    /// Whatever the model or the data reports.
    fn errors(&self, samples: &[usize]) -> Result<Vec<f64>, BoxError>;
}

/// A network that maps one field to another, with both data sets in memory.
///
/// Inputs and targets are normalised for the network; the loss is taken on normalised values, the validation error
/// (relative L2) on physical ones.
pub struct FieldTask<F> {
    /// The network: normalised inputs, `[sample, channel, x, y]`, to normalised outputs; the step while training,
    /// `None` for evaluation.
    pub forward: F,
    /// Training samples.
    pub train: InMemory,
    /// Validation samples.
    pub validation: InMemory,
    /// How inputs are normalised.
    pub input: Normalizer,
    /// How targets are normalised.
    pub target: Normalizer,
    /// What is done at random to training samples.
    pub augment: Augment,
    /// What training minimises.
    pub loss: Loss,
    /// The seed of the augmentation.
    pub seed: u64,
}

impl<F> FieldTask<F>
where
    F: Fn(&Tensor, Option<Step<'_>>) -> Result<Tensor, BoxError>,
{
    /// Predictions of validation samples, on physical values, without a graph.
    ///
    /// # Errors
    ///
    /// Whatever the network reports; samples that are not there.
    pub fn predict(&self, samples: &[usize]) -> Result<Tensor, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let batch = self.validation.batch(samples)?;
        let prediction = (self.forward)(&self.input.encode(&batch.nu)?, None)?;
        Ok(self.target.decode(&prediction)?)
    }

    /// The validation error of predicting the mean of the training targets everywhere alike: what a model must beat.
    ///
    /// # Errors
    ///
    /// Where there are no validation samples or libtorch refuses.
    pub fn mean_field_error(&self) -> Result<f64, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let target = &self.validation.samples().u;
        let mean = self.train.samples().u.f_mean_dim(0, true, None)?.f_expand_as(target)?;
        let errors = relative_l2_errors(&mean, target)?;
        Ok(errors.iter().sum::<f64>() / errors.len() as f64)
    }
}

impl<F> Task for FieldTask<F>
where
    F: Fn(&Tensor, Option<Step<'_>>) -> Result<Tensor, BoxError>,
{
    fn train_samples(&self) -> usize {
        self.train.len()
    }

    fn validation_samples(&self) -> usize {
        self.validation.len()
    }

    fn loss(&self, step: Step<'_>, samples: &[usize]) -> Result<Tensor, BoxError> {
        let batch = self.train.batch(samples)?;
        let batch = self.augment.apply(self.seed, step.epoch, samples, &batch)?;
        let prediction = (self.forward)(&self.input.encode(&batch.nu)?, Some(step))?;
        Ok(self.loss.of(&prediction, &self.target.encode(&batch.u)?)?)
    }

    fn errors(&self, samples: &[usize]) -> Result<Vec<f64>, BoxError> {
        let target = self.validation.batch(samples)?.u;
        Ok(relative_l2_errors(&self.predict(samples)?, &target)?)
    }
}

/// A rank's share of `count` samples: a contiguous range; the first ranks take one more where it does not come out even.
pub(crate) fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let start = |rank: usize| rank * (count / ranks) + rank.min(count % ranks);
    start(rank)..start(rank + 1)
}
