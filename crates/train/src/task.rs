//! Tasks: a model with its data, as the engine sees it.

use std::ops::Range;

use isobar_array::Generator;
use isobar_manager::DeviceMesh;
use tch::Tensor;

use crate::error::Result;
use crate::metric::MetricKind;
use crate::variables::{Variable, VariableError, mean_relative, mean_spectrum};

/// An error of the code that a task calls.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Training step that a loss belongs to.
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

/// Samples that the engine [announces](Task::announce).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coming {
    /// Samples of training in an epoch.
    Train(u64),
    /// Samples of validation.
    Validation,
    /// Rollouts of validation.
    Rollouts,
    /// Samples of training in the next epoch, after all others.
    NextEpoch(u64),
}

/// A model and its data. The engine, [`fit`](crate::fit), says which samples a rank takes; the task turns them into
/// losses and errors. Samples of training, of validation and of rollouts are numbered from 0 each.
pub trait Task {
    /// Number of training samples.
    fn train_samples(&self) -> usize;

    /// Number of validation samples; 0 for none.
    fn validation_samples(&self) -> usize;

    /// Returns the mesh over which the arrays of a loss are sharded, if the task knows it.
    /// [`fit`](crate::fit) compares it with the mesh of the parameters; without it, `fit` relies on the
    /// parameters alone.
    fn mesh(&self) -> Option<&DeviceMesh> {
        None
    }

    /// The mean loss over these training samples, of which there is at least one, on the graph of the parameters.
    ///
    /// # Errors
    ///
    /// Whatever the model or the data reports.
    fn loss(&self, step: Step<'_>, samples: &[usize]) -> Result<Tensor, BoxError>;

    /// Computes the regularization of the parameters, which the engine adds to the loss of each step; by default none. The value and
    /// its graph are the same on every rank, whatever its samples.
    ///
    /// # Errors
    ///
    /// Whatever the model reports.
    fn regularization(&self) -> Result<Option<Tensor>, BoxError> {
        Ok(None)
    }

    /// Returns the variables for which errors are reported, the same on every rank; by default one without a
    /// name. Variables of one name are reported as `u`, `u_2`, ….
    fn variables(&self) -> Vec<Variable> {
        vec![Variable::default()]
    }

    /// Returns the errors of each of these validation samples (at least one), per
    /// [variable](Task::variables). Gradients are off.
    ///
    /// # Errors
    ///
    /// Whatever the model or the data reports.
    fn errors(&self, samples: &[usize]) -> Result<Vec<Vec<VariableError>>, BoxError>;

    /// Announces the next samples in order, batch by batch, for prefetching. At the start of an epoch these are the epoch, its
    /// validation and the next epoch. An announcement replaces earlier ones of the same kind; [`Coming::Train`] also replaces
    /// [`Coming::NextEpoch`].
    fn announce(&self, _coming: Coming, _batches: &[&[usize]]) {}

    /// Returns the metrics that are reported besides; by default none.
    fn metrics(&self) -> &[MetricKind] {
        &[]
    }

    /// Returns the number of steps of the [rollouts](Task::rollouts); by default 0, for no metrics of them.
    fn rollout_steps(&self) -> usize {
        0
    }

    /// Returns the errors of each of these validation samples, with the terms of the [metrics](Task::metrics). Gradients are off.
    ///
    /// # Errors
    ///
    /// Those of [`errors`](Task::errors).
    fn scored_errors(&self, samples: &[usize]) -> Result<Vec<Scored<Vec<VariableError>>>, BoxError> {
        Ok(self.errors(samples)?.into_iter().map(Scored::from).collect())
    }

    /// Returns the errors of each of these rollouts, with the terms of the [metrics](Task::metrics) after each step. Gradients are
    /// off.
    ///
    /// # Errors
    ///
    /// Those of [`rollout_errors`](Task::rollout_errors).
    fn scored_rollouts(&self, rollouts: &[usize]) -> Result<Vec<Scored<RolloutError>>, BoxError> {
        Ok(self.rollout_errors(rollouts)?.into_iter().map(Scored::from).collect())
    }

    /// Number of ranks that share the samples of a batch within the task, where its own arrays are split over ranks.
    fn sharing_ranks(&self) -> usize {
        1
    }

    /// Warnings about ranks that have no part of the task's fields.
    fn idle_ranks(&self) -> Vec<String> {
        Vec::new()
    }

    /// Number of rollouts that are validated, several steps each; 0 for none.
    fn rollouts(&self) -> usize {
        0
    }

    /// The errors of each of these rollouts, of which there is at least one. Gradients are off.
    ///
    /// # Errors
    ///
    /// Whatever the model or the data reports.
    fn rollout_errors(&self, _rollouts: &[usize]) -> Result<Vec<RolloutError>, BoxError> {
        Ok(Vec::new())
    }

    /// Returns the errors of a baseline. At the end of a run [`fit`](crate::fit) warns of variables that are
    /// predicted no better than by it. All ranks call; by default there is none.
    ///
    /// # Errors
    ///
    /// Whatever the data reports.
    fn baseline_errors(&self) -> Result<Option<Baseline>, BoxError> {
        Ok(None)
    }
}

/// Errors of a sample, and the terms of metrics, whose means over samples give their values.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored<E> {
    /// The errors.
    pub errors: E,
    /// By step and metric: terms by term and variable, and for each variable 1, or 0 (of terms, too) if no point counts. Empty without
    /// metrics.
    pub terms: Vec<f64>,
}

impl<E> From<E> for Scored<E> {
    fn from(errors: E) -> Self {
        Self { errors, terms: Vec::new() }
    }
}

/// Errors of a rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutError {
    /// Errors of each variable over all steps: the mean of the relative errors, and the RMSE.
    pub variables: Vec<VariableError>,
    /// Σ |E(p) − E(t)| / Σ E(t) of the energy spectra E of each variable after the last step; see
    /// [`periodic::energy_spectrum`](isobar_array::periodic::energy_spectrum). `None` of a variable that is missing everywhere.
    pub spectra: Vec<Option<f64>>,
}

impl RolloutError {
    /// Mean over the variables, and over the steps, of the relative errors.
    pub fn error(&self) -> f64 {
        mean_relative(&self.variables)
    }

    /// Mean over the variables of the errors of their energy spectra.
    pub fn spectrum(&self) -> f64 {
        mean_spectrum(&self.spectra)
    }
}

/// Errors of a forecast without a model, which a model should beat.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Baseline {
    /// Description, such as "predicting no change".
    pub name: String,
    /// Errors of the validation samples, per variable; empty if they are unknown.
    pub validation: Vec<VariableError>,
    /// Errors of the rollouts, per variable, over all steps; empty if they are unknown.
    pub rollouts: Vec<VariableError>,
}

/// A rank's share of `count` samples: a contiguous range; the first ranks take one more where it does not come out even.
pub(crate) fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let start = |rank: usize| rank * (count / ranks) + rank.min(count % ranks);
    start(rank)..start(rank + 1)
}
