//! A training step, as a task sees it.

use super::inputs::{Inputs, Surrogate};
use crate::error::Error;
use crate::loss::{LossArray, LossKind, Weighting};
use crate::task::{BoxError, Step};
use crate::weights::Weights;

/// Target of a step.
#[derive(Debug)]
pub struct Target<A> {
    /// Normalised fields, `[sample, channel, spatial…]`; missing values are 0.
    pub fields: A,
    /// Weights of `[train.weights]`, and the mask of the values that are not missing.
    pub weights: Weighting<A>,
}

/// A training step: network, inputs, targets and loss.
pub struct Training<'a, A> {
    network: &'a dyn Surrogate<A>,
    step: Step<'a>,
    targets: Vec<Target<A>>,
    loss: &'a LossKind,
    weights: &'a Weights,
}

impl<A> std::fmt::Debug for Training<'_, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let steps = self.targets.len();
        f.debug_struct("Training").field("step", &self.step).field("steps", &steps).finish_non_exhaustive()
    }
}

impl<'a, A: LossArray> Training<'a, A> {
    /// A step with a target for each step of the samples.
    pub(crate) fn new(
        network: &'a dyn Surrogate<A>,
        step: Step<'a>,
        targets: Vec<Target<A>>,
        (loss, weights): (&'a LossKind, &'a Weights),
    ) -> Self {
        Self { network, step, targets, loss, weights }
    }

    /// Returns the step, with its random numbers.
    pub fn step(&self) -> Step<'a> {
        self.step
    }

    /// Returns the targets, one for each step of the samples.
    pub fn targets(&self) -> &[Target<A>] {
        &self.targets
    }

    /// Returns the loss of the configuration, `train.loss`.
    pub fn loss(&self) -> &LossKind {
        self.loss
    }

    /// Returns the inputs of the first step.
    ///
    /// # Errors
    ///
    /// Forcings or times that are not known.
    pub fn inputs(&self) -> Result<Inputs<'a, A>, BoxError> {
        Inputs::of_training(self.network, self.step)
    }

    /// Calls the network once for each step of the samples, with its own outputs as the next inputs, and returns the normalised fields
    /// after each step. If the network predicts changes, these are the changed fields.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    pub fn roll_out(&self) -> Result<Vec<A>, BoxError> {
        self.network.roll_out(self.step)
    }

    /// Computes `train.loss` of the fields after each step against the targets: the mean over steps, with the weights and the mask of
    /// each target and the weights of lead times. A scalar.
    ///
    /// # Errors
    ///
    /// Another number of steps than the targets have; those of the loss.
    pub fn compare(&self, outputs: &[A]) -> Result<A, BoxError> {
        if outputs.len() != self.targets.len() {
            let expected = format!("those of {} steps, as the targets", self.targets.len());
            return Err(Error::invalid(
                "the fields to compare",
                format!("{} steps", outputs.len()),
                expected,
            )
            .into());
        }
        let losses = outputs.iter().zip(&self.targets).map(|(output, target)| {
            let weights = target.weights.shallow_clone();
            let weights = match self.network.loss_scales(&target.fields)? {
                Some(scales) => weights.with_scales(scales),
                None => weights,
            };
            Ok(self.loss.weighted(output, &target.fields, &weights)?)
        });
        Ok(self.weights.over_steps(&losses.collect::<Result<Vec<A>, BoxError>>()?)?)
    }

    /// Returns normalised outputs or targets, `[sample, channel, spatial…]`, in physical units, on their graph.
    ///
    /// # Errors
    ///
    /// Another number of channels than the targets have.
    pub fn physical(&self, fields: &A) -> Result<A, BoxError> {
        self.network.physical(fields)
    }

    /// Returns the network's own output that leads to a normalised target of the first step: the target itself, or the change from the
    /// newest input frame in units of changes if the network predicts changes.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    pub fn output_for(&self, target: &A) -> Result<A, BoxError> {
        self.network.output_for(target)
    }
}
