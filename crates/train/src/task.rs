//! Tasks: a model with its data, as the engine sees it.

use std::ops::Range;

use isobar_array::{Array, Convert, Elementwise, Generator, Local, Shape};
use isobar_data::{Augment, InMemory, Normalizer};
use isobar_manager::DeviceMesh;
use isobar_models::Batch;
use tch::Tensor;

use crate::error::Result;
use crate::fields::FieldLayout;
use crate::loss::{LossKind, spectrum_errors, variable_errors};
use crate::model::Forward;
use crate::variables::{Variable, VariableError, mean_errors, mean_relative, mean_spectrum};

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

/// Errors of a rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutError {
    /// Errors of each variable over all steps: the mean of the relative errors, and the RMSE.
    pub variables: Vec<VariableError>,
    /// Σ |E(p) − E(t)| / Σ E(t) of the energy spectra E of each variable after the last step; see
    /// [`periodic::energy_spectrum`](isobar_array::periodic::energy_spectrum).
    pub spectra: Vec<f64>,
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

/// A network that maps one field to the next: from an input to a target, or from a frame of a trajectory to the following one,
/// over and over. Inputs and targets are normalised for it.
pub struct FieldModel<L, F> {
    /// The network: normalised inputs, `[sample, channel, x, y]`, to normalised outputs; the step while training,
    /// `None` for evaluation.
    pub forward: F,
    /// Layout of the fields.
    pub layout: L,
    /// Channels behind those of every input, `[channel, x, y]`: this rank's window of where the points are.
    pub positions: Option<Tensor>,
    /// Normalisation of the network's outputs if they are changes from the input; `None` if they are the next
    /// fields. See [`Normalizer::of_scales`].
    pub change: Option<Normalizer>,
    /// Normalizer of inputs.
    pub input: Normalizer,
    /// Normalisation of targets; with `change`, that of the inputs.
    pub target: Normalizer,
    /// Variables of the channels of targets.
    pub variables: Vec<Variable>,
}

/// A [`FieldModel`] with its data in memory.
///
/// The loss is the mean over the steps of a sample, on normalised values; if the network predicts changes,
/// the difference from the target is in units of each variable's changes. Validation errors are per variable,
/// on physical values.
pub struct FieldTask<L, F> {
    /// The network.
    pub model: FieldModel<L, F>,
    /// Training samples: this rank's window of them.
    pub train: InMemory,
    /// Validation samples, of one step each.
    pub validation: InMemory,
    /// Rollouts that are validated, of several steps each.
    pub rollouts: Option<InMemory>,
    /// Random augmentation of training samples.
    pub augment: Augment,
    /// Loss.
    pub loss: LossKind,
    /// The seed of the augmentation.
    pub seed: u64,
}

impl<L, F> FieldModel<L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    /// Rolls out the network from inputs over `steps` steps, on physical values and without a graph: `input` is this rank's window
    /// of its samples, of `count` in all. Several steps need as many output as input channels.
    ///
    /// All ranks of the layout call.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    pub fn roll_out(&self, input: &Tensor, count: usize, steps: usize) -> Result<Vec<L::Array>, BoxError> {
        self.roll_out_at(input, count, steps, &[])
    }

    /// Does the same as [`roll_out`](Self::roll_out) for a network that reads the time: `times` has, for each step, the times
    /// of this rank's samples.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    pub fn roll_out_at(
        &self,
        input: &Tensor,
        count: usize,
        steps: usize,
        times: &[Vec<f64>],
    ) -> Result<Vec<L::Array>, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let outputs = self.steps(&self.input.encode(input)?, count, (steps, times), None)?;
        outputs.iter().map(|y| self.layout.map(y, |part| Ok(self.target.decode(part)?))).collect()
    }

    /// Normalised outputs after each step.
    fn steps(
        &self,
        input: &Tensor,
        count: usize,
        (steps, times): (usize, &[Vec<f64>]),
        step: Option<Step<'_>>,
    ) -> Result<Vec<L::Array>, BoxError> {
        if (steps > 1 || self.change.is_some()) && self.input != self.target {
            return Err("several steps, or changes, need inputs and targets that are normalised alike".into());
        }
        let mut x = self.layout.array(input, count)?;
        let positions = self.positions.as_ref().map(|positions| -> Result<L::Array, BoxError> {
            let own = input.size().first().copied().unwrap_or(0);
            let each = positions.f_unsqueeze(0)?.f_expand([&[own], &positions.size()[..]].concat(), false)?;
            Ok(self.layout.array(&each, count)?)
        });
        let positions = positions.transpose()?;
        let mut outputs = Vec::with_capacity(steps);
        for at in 0..steps {
            let fields = match &positions {
                Some(positions) => L::Array::cat(&[&x, positions], 1)?,
                None => x.shallow_clone(),
            };
            let mut batch = Batch::of_fields(fields);
            if let Some(times) = times.get(at) {
                let times = Tensor::f_from_slice(times)?.f_view([-1, 1])?;
                let times = times.f_to_device(input.device())?.f_to_kind(input.kind())?;
                batch = batch.with(Batch::<L::Array>::TIME, self.layout.per_sample(&times, count)?);
            }
            let y = self.forward.forward(batch, step)?;
            // In mixed precision the network's output may be of 16 bits; what it is added to and compared with is not.
            let y = y.to_kind(x.kind())?;
            let y = if y.shape() == x.shape() { y.laid_out_as(&x)? } else { y };
            if (steps > 1 || self.change.is_some()) && y.shape() != x.shape() {
                let (from, to) = (x.shape(), y.shape());
                return Err(format!(
                    "several steps, or changes, need outputs as inputs, not {to:?} of {from:?}"
                )
                .into());
            }
            x = match &self.change {
                Some(change) => x.add(&self.scaled(&y, change.std(), self.input.std())?)?,
                None => y,
            };
            outputs.push(x.shallow_clone());
        }
        Ok(outputs)
    }

    /// Scales the channels of fields by `by` / `of`: one number for each channel, or for all.
    fn scaled(&self, fields: &L::Array, by: &[f64], of: &[f64]) -> Result<L::Array, BoxError> {
        let channels = by.len().max(of.len());
        let at = |all: &[f64], channel: usize| all.get(channel).or(all.first()).copied().unwrap_or(1.0);
        let factors: Vec<f64> = (0..channels).map(|channel| at(by, channel) / at(of, channel)).collect();
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(fields.shallow_clone());
        }
        let scale = Normalizer::of_scales(&factors)?;
        self.layout.map(fields, |part| Ok(scale.decode(part)?))
    }

    /// Returns the output that the loss compares with the normalised target. If the network predicts changes,
    /// the difference is in units of each variable's changes, since slowly changing variables would not count
    /// otherwise.
    fn weighted(&self, output: &L::Array, target: &L::Array) -> Result<L::Array, BoxError> {
        let Some(change) = &self.change else { return Ok(output.shallow_clone()) };
        if change.std() == self.target.std() {
            return Ok(output.shallow_clone());
        }
        let difference = self.scaled(&output.sub(target)?, self.target.std(), change.std())?;
        Ok(target.add(&difference)?)
    }

    /// Returns the errors of predictions, per variable.
    fn errors_of(
        &self,
        prediction: &L::Array,
        target: &L::Array,
    ) -> Result<Vec<Vec<VariableError>>, BoxError> {
        let channels = target.shape().get(1).copied().unwrap_or(0);
        if self.variables.len() as i64 != channels {
            let names: Vec<&str> = self.variables.iter().map(|variable| &*variable.name).collect();
            return Err(format!(
                "the targets have {channels} channels, but {} variables are named: {names:?}; name each channel",
                names.len()
            )
            .into());
        }
        Ok(variable_errors(prediction, target)?)
    }
}

impl<L, F> FieldTask<L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    /// Predicts samples of `data` after each step, on physical values, in the layout of the fields, without a graph.
    ///
    /// All ranks of the layout call.
    ///
    /// # Errors
    ///
    /// Whatever the network reports; samples that are not there.
    pub fn predict(&self, data: &InMemory, samples: &[usize]) -> Result<Vec<L::Array>, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let batch = data.batch(self.model.layout.own(samples)?)?;
        self.model.roll_out_at(&batch.input, samples.len(), batch.targets.len(), &batch.times)
    }

    /// Inputs and what truly comes of them after each step, on physical values, in the layout of the fields.
    ///
    /// All ranks of the layout call.
    ///
    /// # Errors
    ///
    /// Samples that are not there; what an exchange reports.
    pub fn truth(&self, data: &InMemory, samples: &[usize]) -> Result<(L::Array, Vec<L::Array>), BoxError> {
        let batch = data.batch(self.model.layout.own(samples)?)?;
        let array = |part: &Tensor| -> Result<L::Array, BoxError> {
            Ok(self.model.layout.array(part, samples.len())?)
        };
        let targets = batch.targets.iter().map(array).collect::<Result<_, _>>()?;
        Ok((array(&batch.input)?, targets))
    }

    /// Returns the validation errors of the baseline, per variable: persistence (no change) for trajectories,
    /// otherwise the mean of the training targets at each point. Empty without validation samples.
    ///
    /// All ranks of the layout call.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    pub fn baseline(&self) -> Result<Vec<VariableError>, BoxError> {
        Ok(self.baselines(&self.validation)?.into_iter().next().unwrap_or_default())
    }

    /// Returns the baseline's errors of rollouts, over all their steps. Empty without rollouts.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    pub fn rollout_baseline(&self) -> Result<Vec<VariableError>, BoxError> {
        let Some(data) = &self.rollouts else { return Ok(Vec::new()) };
        Ok(mean_errors(&self.baselines(data)?))
    }

    /// Errors of the baseline after each step, over all samples of `data`.
    fn baselines(&self, data: &InMemory) -> Result<Vec<Vec<VariableError>>, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let layout = &self.model.layout;
        let mean = match self.persists() || data.is_empty() {
            true => None,
            false => Some(self.train.targets().f_mean_dim(0, true, None)?),
        };
        let all: Vec<usize> = (0..data.len()).collect();
        let mut errors: Vec<Vec<Vec<VariableError>>> = vec![Vec::new(); data.steps()];
        for samples in all.chunks(BASELINE_SAMPLES) {
            let batch = data.batch(layout.own(samples)?)?;
            for (target, errors) in batch.targets.iter().zip(&mut errors) {
                let prediction = match &mean {
                    Some(mean) => mean.f_expand_as(target)?,
                    None => batch.input.shallow_clone(),
                };
                let array = |part: &Tensor| layout.array(part, samples.len());
                errors.extend(self.model.errors_of(&array(&prediction)?, &array(target)?)?);
            }
        }
        Ok(errors.iter().map(mean_errors).filter(|errors| !errors.is_empty()).collect())
    }

    /// Returns whether inputs and targets are frames of the same trajectories.
    pub fn persists(&self) -> bool {
        self.train.of_trajectories()
    }
}

impl<L, F> Task for FieldTask<L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    fn train_samples(&self) -> usize {
        self.train.len()
    }

    fn validation_samples(&self) -> usize {
        self.validation.len()
    }

    fn mesh(&self) -> Option<&DeviceMesh> {
        self.model.layout.mesh()
    }

    fn loss(&self, step: Step<'_>, samples: &[usize]) -> Result<Tensor, BoxError> {
        let own = self.model.layout.own(samples)?;
        let batch = self.train.batch(own)?;
        let turned =
            |field: &Tensor| self.model.layout.augmented(field, (self.augment, self.seed), step.epoch, own);
        let input = self.model.input.encode(&turned(&batch.input)?)?;
        let steps = (batch.targets.len(), &batch.times[..]);
        let outputs = self.model.steps(&input, samples.len(), steps, Some(step))?;
        let losses = outputs.iter().zip(&batch.targets).map(|(output, target)| {
            let target = self.model.target.encode(&turned(target)?)?;
            let target = self.model.layout.array(&target, samples.len())?;
            Ok(self.loss.of(&self.model.weighted(output, &target)?, &target)?.whole()?)
        });
        let losses = losses.collect::<Result<Vec<Tensor>, BoxError>>()?;
        Ok(Tensor::f_stack(&losses, 0)?.f_mean(None)?)
    }

    fn variables(&self) -> Vec<Variable> {
        self.model.variables.clone()
    }

    fn errors(&self, samples: &[usize]) -> Result<Vec<Vec<VariableError>>, BoxError> {
        let batch = self.validation.batch(self.model.layout.own(samples)?)?;
        let prediction = self.model.roll_out_at(&batch.input, samples.len(), 1, &batch.times)?;
        let pairs = prediction.iter().zip(&batch.targets);
        let mut errors = Vec::new();
        for (prediction, target) in pairs {
            errors = self.model.errors_of(prediction, &self.model.layout.array(target, samples.len())?)?;
        }
        Ok(errors)
    }

    fn sharing_ranks(&self) -> usize {
        self.model.layout.sharing_ranks()
    }

    fn idle_ranks(&self) -> Vec<String> {
        self.model.layout.idle_ranks()
    }

    fn rollouts(&self) -> usize {
        self.rollouts.as_ref().map_or(0, InMemory::len)
    }

    fn baseline_errors(&self) -> Result<Option<Baseline>, BoxError> {
        let name = if self.persists() { "predicting no change" } else { "predicting the mean field" };
        let (validation, rollouts) = (self.baseline()?, self.rollout_baseline()?);
        Ok(Some(Baseline { name: name.to_owned(), validation, rollouts }))
    }

    fn rollout_errors(&self, rollouts: &[usize]) -> Result<Vec<RolloutError>, BoxError> {
        let Some(data) = &self.rollouts else { return Ok(Vec::new()) };
        let batch = data.batch(self.model.layout.own(rollouts)?)?;
        let steps = batch.targets.len();
        let predictions = self.model.roll_out_at(&batch.input, rollouts.len(), steps, &batch.times)?;
        let mut of_steps = vec![Vec::with_capacity(steps); rollouts.len()];
        let mut spectra = Vec::new();
        for (index, (prediction, target)) in predictions.iter().zip(&batch.targets).enumerate() {
            let target = self.model.layout.array(target, rollouts.len())?;
            let errors = self.model.errors_of(prediction, &target)?;
            of_steps.iter_mut().zip(errors).for_each(|(all, error)| all.push(error));
            if index + 1 == steps {
                spectra = spectrum_errors(prediction, &target)?;
            }
        }
        let errors = of_steps.iter().zip(spectra);
        Ok(errors.map(|(steps, spectra)| RolloutError { variables: mean_errors(steps), spectra }).collect())
    }
}

/// Number of samples for which a baseline is computed at a time: the same on every rank, since ranks may
/// share fields.
const BASELINE_SAMPLES: usize = 64;

/// A rank's share of `count` samples: a contiguous range; the first ranks take one more where it does not come out even.
pub(crate) fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let start = |rank: usize| rank * (count / ranks) + rank.min(count % ranks);
    start(rank)..start(rank + 1)
}
