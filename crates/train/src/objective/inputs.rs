//! Inputs of a network at a step, and the network, as a task sees them.

use isobar_array::{Array, Generator};
use isobar_models::{Batch, BatchPart, Denoiser};

use crate::task::{BoxError, Step};

/// A network on a batch, whatever the layout of the fields.
pub(crate) trait Surrogate<A> {
    /// Calls the network; `step` while training, `None` for evaluation.
    fn forward(&self, batch: Batch<A>, step: Option<Step<'_>>) -> Result<A, BoxError>;

    /// Returns the inputs of the first step.
    fn first(&self) -> Result<Batch<A>, BoxError>;

    /// Returns normalised fields after each step of training.
    fn roll_out(&self, step: Step<'_>) -> Result<Vec<A>, BoxError>;

    /// Returns the network's own output that leads to a normalised target of the first step.
    fn output_for(&self, target: &A) -> Result<A, BoxError>;

    /// Returns factors of the differences between outputs and normalised targets in the loss, `[1, channel, 1…]`; `None` if they
    /// are all 1.
    fn loss_scales(&self, target: &A) -> Result<Option<A>, BoxError>;

    /// Returns normalised outputs in physical units.
    fn physical(&self, outputs: &A) -> Result<A, BoxError>;

    /// Returns the inputs of the second of two stages, and the prediction of the first, if there is one.
    fn staged(&self, inputs: Batch<A>) -> Result<(Batch<A>, Option<A>), BoxError>;

    /// Returns the number of channels of the first stage's prediction among the inputs.
    fn mean_channels(&self) -> i64;

    /// Returns the number of output channels.
    fn outputs(&self) -> usize;

    /// Returns the data and noise levels of a denoiser.
    fn denoiser(&self) -> Option<Denoiser>;

    /// Returns true if scalars are conditions of samples.
    fn has_conditions(&self) -> bool;
}

/// Inputs of a network at one step, and the network itself.
///
/// The inputs are normalised: the array `fields`, `[sample, channel, spatial…]`, with the channels of the input frames, forcings and
/// positions, and `time` for data with times. Missing values are filled.
pub struct Inputs<'a, A> {
    network: &'a dyn Surrogate<A>,
    batch: Batch<A>,
    step: Option<Step<'a>>,
    generator: &'a Generator,
    part: Option<BatchPart>,
}

impl<A> std::fmt::Debug for Inputs<'_, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.batch.names().collect();
        f.debug_struct("Inputs").field("arrays", &names).field("part", &self.part).finish_non_exhaustive()
    }
}

impl<'a, A: Array> Inputs<'a, A> {
    /// Inputs of a step of evaluation, of samples that are `part` of all.
    pub(crate) fn of_evaluation(
        network: &'a dyn Surrogate<A>,
        batch: Batch<A>,
        (generator, part): (&'a Generator, Option<BatchPart>),
    ) -> Self {
        Self { network, batch, step: None, generator, part }
    }

    /// Inputs of the first step of training.
    pub(super) fn of_training(network: &'a dyn Surrogate<A>, step: Step<'a>) -> Result<Self, BoxError> {
        let part = Some(BatchPart { offset: step.offset, total: step.total });
        Ok(Self { network, batch: network.first()?, step: Some(step), generator: step.generator, part })
    }

    /// Returns the arrays of the inputs.
    pub fn batch(&self) -> &Batch<A> {
        &self.batch
    }

    /// Calls the network with the inputs, once.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    pub fn call(self) -> Result<A, BoxError> {
        self.network.forward(self.batch, self.step)
    }

    /// Calls the network with other arrays, such as inputs with noise, in the mode of the step. They have `count` samples for each
    /// of the inputs.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    pub fn forward(&self, batch: Batch<A>, count: usize) -> Result<A, BoxError> {
        let count = count as i64;
        let step =
            self.step.map(|step| Step { offset: step.offset * count, total: step.total * count, ..step });
        self.network.forward(batch, step)
    }

    /// Returns the random numbers of the step, or of the evaluation, in the same state on every rank of the fields' mesh.
    pub fn generator(&self) -> &'a Generator {
        self.generator
    }

    /// Returns the position of these samples in the global batch of the step or the evaluation; `None` if they are the full batch.
    pub fn part(&self) -> Option<BatchPart> {
        self.part
    }

    /// Returns the number of channels of the targets.
    pub fn outputs(&self) -> usize {
        self.network.outputs()
    }

    /// Returns the data and noise levels of a denoiser; `None` for other networks.
    pub fn denoiser(&self) -> Option<Denoiser> {
        self.network.denoiser()
    }

    /// Returns true if the network is given scalars as conditions of samples.
    pub fn has_conditions(&self) -> bool {
        self.network.has_conditions()
    }

    /// Calls the network of the [first stage](super::Objective::first_stage), and returns its prediction; `None` without one. If the
    /// prediction is an input of the second stage, its channels are prepended to the inputs.
    ///
    /// # Errors
    ///
    /// Whatever that network reports; scales that differ from those of its training.
    pub fn call_first_stage(&mut self) -> Result<Option<A>, BoxError> {
        let (batch, mean) = self.network.staged(std::mem::take(&mut self.batch))?;
        self.batch = batch;
        Ok(mean)
    }

    /// Returns the number of channels that [`call_first_stage`](Self::call_first_stage) adds to the inputs.
    pub fn mean_channels(&self) -> i64 {
        self.network.mean_channels()
    }
}
