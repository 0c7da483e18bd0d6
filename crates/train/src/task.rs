//! Tasks: a model with its data, as the engine sees it.

use std::collections::VecDeque;
use std::ops::Range;

use isobar_array::{Array, Convert, Elementwise, Generator, Local, Shape};
use isobar_data::{Augment, Normalizer, Request, Samples};
use isobar_manager::DeviceMesh;
use isobar_models::{Batch, BatchPart};
use tch::Tensor;

use crate::denoising::Denoising;
use crate::error::Result;
use crate::fields::FieldLayout;
use crate::loss::missing::{counted, fill, present, present_in_both};
use crate::loss::{
    LossKind, ensemble_mean, is_ensemble, masked_variable_errors, spectrum_errors, variable_errors,
};
use crate::metric::{Forecast, MetricKind, Report, summands};
use crate::model::Forward;
use crate::rollout::{Roles, Sample, Start};
use crate::variables::{Variable, VariableError, mean_errors, mean_relative, mean_spectrum};
use crate::weights::Weights;

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

/// Samples that the engine [announces](Task::announce).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coming {
    /// Samples of training in an epoch.
    Train(u64),
    /// Samples of validation.
    Validation,
    /// Rollouts of validation.
    Rollouts,
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

    /// Says which samples the engine asks for next, batch by batch in this order, so that they can be read ahead. What was said
    /// before of the same kind does not hold any more.
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
    /// Terms by step, metric, term and variable; empty without metrics.
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
    /// Roles of the channels of stored frames; `None` if all are inputs and outputs, of one frame.
    pub roles: Option<Roles>,
    /// Values that the network sees in place of missing ones (NaN) of its input, after normalisation; `None` if no value is missing. With
    /// it, missing values of targets have no part in losses, errors and metrics, and points that are missing in the newest input
    /// frame stay so in a rollout. The same on all ranks.
    pub missing: Option<f64>,
}

/// A [`FieldModel`] with its data, in memory or read while they are needed.
///
/// The loss is the mean over the steps of a sample, on normalised values; if the network predicts changes,
/// the difference from the target is in units of each variable's changes. Validation errors are per variable,
/// on physical values.
pub struct FieldTask<L, F> {
    /// The network.
    pub model: FieldModel<L, F>,
    /// Training samples: this rank's window of them.
    pub train: Box<dyn Samples>,
    /// Validation samples, of one step each.
    pub validation: Box<dyn Samples>,
    /// Rollouts that are validated, of several steps each.
    pub rollouts: Option<Box<dyn Samples>>,
    /// Random augmentation of training samples.
    pub augment: Augment,
    /// Loss.
    pub loss: LossKind,
    /// Weights of the loss and of metrics; [`Weights::default`] for none.
    pub weights: Weights,
    /// Metrics that are reported besides the errors; [`Report::default`] for none.
    pub report: Report,
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
        self.roll_out_from(Start::of_frame(input, steps, times), count)
    }

    /// Does the same as [`roll_out_at`](Self::roll_out_at) from several frames and with forcings. Of a network that returns an
    /// ensemble it gives the mean.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    pub fn roll_out_from(&self, start: Start, count: usize) -> Result<Vec<L::Array>, BoxError> {
        let dims = start.frames.first().map_or(0, Tensor::dim);
        let mean = |fields: L::Array| match fields.shape().len() > dims {
            true => Ok(ensemble_mean(&fields)?),
            false => Ok(fields),
        };
        self.roll_out_members(start, count)?.into_iter().map(mean).collect()
    }

    /// Does the same as [`roll_out_from`](Self::roll_out_from), and gives all members of an ensemble: a network that returns one
    /// gives `[sample, member, channel, spatial…]`.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    pub fn roll_out_members(&self, mut start: Start, count: usize) -> Result<Vec<L::Array>, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let dims = start.frames.first().map_or(0, Tensor::dim);
        for frame in &mut start.frames {
            *frame = self.input.encode(frame)?;
        }
        let outputs = self.steps(&start, count, None)?;
        let decode = |part: &Tensor| match part.dim() > dims {
            // Members beside each other, as samples are.
            true => Ok(self.target.decode(&part.f_flatten(0, 1)?)?.f_view_as(part)?),
            false => Ok(self.target.decode(part)?),
        };
        outputs.iter().map(|y| self.layout.map(y, decode)).collect()
    }

    /// Normalised outputs after each step, from normalised frames.
    fn steps(&self, start: &Start, count: usize, step: Option<Step<'_>>) -> Result<Vec<L::Array>, BoxError> {
        let several = start.steps > 1 || self.change.is_some();
        if several && !self.targets_begin_with_inputs() {
            return Err("several steps, or changes, need inputs and targets that are normalised alike".into());
        }
        let history = self.roles.as_ref().map_or(1, |roles| roles.history);
        let (Some(input), true) = (start.frames.last(), start.frames.len() == history) else {
            return Err(
                format!("a rollout starts from {} frames, expected {history}", start.frames.len()).into()
            );
        };
        let filled = |frame: &Tensor| -> Result<L::Array, BoxError> {
            Ok(self.layout.array(&fill(frame, self.missing)?, count)?)
        };
        let mut frames: VecDeque<L::Array> = start.frames.iter().map(filled).collect::<Result<_, _>>()?;
        let kept = match self.missing {
            None => None,
            Some(_) => Some(self.layout.array(&present(input)?, count)?),
        };
        let positions = self.positions_of(input, count)?;
        let generator = self.forward.denoising().map(Denoising::generator);
        let mut outputs = Vec::with_capacity(start.steps);
        for at in 0..start.steps {
            let batch = self.batch((start, at), &frames, positions.as_ref(), count)?;
            let y = match (step, self.forward.denoising().zip(generator.as_ref())) {
                (None, Some((denoising, generator))) => {
                    let draws = (generator, start.part);
                    let denoise = |batch| self.forward.forward(batch, None);
                    denoising.sample(denoise, &batch, self.variables.len(), draws)?
                }
                _ => self.forward.forward(batch, step)?,
            };
            let Some(x) = frames.pop_front() else { break };
            let newest = frames.back().unwrap_or(&x);
            let (state, output) = self.advance(newest, y, several)?;
            frames.push_back(self.still_missing(state, kept.as_ref())?);
            outputs.push(output);
        }
        Ok(outputs)
    }

    /// A state in which the points that were missing in the input are filled again.
    fn still_missing(&self, state: L::Array, kept: Option<&L::Array>) -> Result<L::Array, BoxError> {
        let (Some(kept), Some(value)) = (kept, self.missing) else { return Ok(state) };
        if kept.shape() != state.shape() {
            return Ok(state);
        }
        let value = state.constant(&Tensor::from(value).f_to_kind(state.kind())?)?;
        Ok(kept.select_where(&state, &value)?)
    }

    /// Physical fields with the channels of outputs, with what stands in place of missing values.
    ///
    /// # Errors
    ///
    /// Another number of channels.
    pub fn filled(&self, fields: &Tensor) -> Result<Tensor, BoxError> {
        if self.missing.is_none() {
            return Ok(fields.shallow_clone());
        }
        Ok(self.target.decode(&fill(&self.target.encode(fields)?, self.missing)?)?)
    }

    /// Positions of the points for each of this rank's samples.
    fn positions_of(&self, input: &Tensor, count: usize) -> Result<Option<L::Array>, BoxError> {
        let Some(positions) = &self.positions else { return Ok(None) };
        let own = input.size().first().copied().unwrap_or(0);
        let each = positions.f_unsqueeze(0)?.f_expand([&[own], &positions.size()[..]].concat(), false)?;
        Ok(Some(self.layout.array(&each, count)?))
    }

    /// The network's input at a step: the last frames, forcings and positions as fields, and the times.
    fn batch(
        &self,
        (start, at): (&Start, usize),
        frames: &VecDeque<L::Array>,
        positions: Option<&L::Array>,
        count: usize,
    ) -> Result<Batch<L::Array>, BoxError> {
        let options = match start.frames.last() {
            Some(frame) => (frame.kind(), frame.device()),
            None => return Err("a rollout starts from no frame".into()),
        };
        let forcings = match &self.roles {
            Some(roles) => roles.forcings(start, at, options)?,
            None => None,
        };
        let forcings = forcings.map(|forcings| self.layout.array(&forcings, count)).transpose()?;
        let parts: Vec<&L::Array> = frames.iter().chain(&forcings).chain(positions).collect();
        let fields = match parts.as_slice() {
            [x] => x.shallow_clone(),
            parts => L::Array::cat(parts, 1)?,
        };
        let batch = Batch::of_fields(fields);
        let Some(times) = start.times.get(at) else { return Ok(batch) };
        let times = Tensor::f_from_slice(times)?.f_view([-1, 1])?;
        let times = times.f_to_device(options.1)?.f_to_kind(options.0)?;
        Ok(batch.with(Batch::<L::Array>::TIME, self.layout.per_sample(&times, count)?))
    }

    /// The loss of a denoiser, for normalised frames and targets of one step.
    fn denoising_loss(
        &self,
        denoising: &Denoising,
        (start, targets): (&Start, &[Tensor]),
        count: usize,
        step: Step<'_>,
    ) -> Result<Tensor, BoxError> {
        if self.missing.is_some() {
            return Err("a denoiser takes no mask of missing values; --set data.missing=fill".into());
        }
        let (Some(input), [target]) = (start.frames.last(), targets) else {
            return Err(format!(
                "a denoiser is trained on single steps, not on {}; --set data.train_steps=1",
                targets.len()
            )
            .into());
        };
        let frames: VecDeque<L::Array> =
            start.frames.iter().map(|frame| self.layout.array(frame, count)).collect::<Result<_>>()?;
        let positions = self.positions_of(input, count)?;
        let batch = self.batch((start, 0), &frames, positions.as_ref(), count)?;
        let target = self.layout.array(target, count)?;
        let clean = match &self.change {
            Some(change) => self.change_to(&target, &self.layout.array(input, count)?, change)?,
            None => target,
        };
        let part = BatchPart { offset: step.offset, total: step.total };
        let denoise = |batch| self.forward.forward(batch, Some(step));
        Ok(denoising.loss(denoise, &batch, &clean, (step.generator, part))?.whole()?)
    }

    /// The output of a network of changes that leads from `x` to `target`: the inverse of a step.
    fn change_to(&self, target: &L::Array, x: &L::Array, change: &Normalizer) -> Result<L::Array, BoxError> {
        let channels = |array: &L::Array| array.shape().get(1).copied().unwrap_or(0);
        let (prognostic, all) = (channels(x), channels(target));
        let state =
            if prognostic == all { target.shallow_clone() } else { target.narrow(1, 0, prognostic)? };
        let moved = self.scaled(&state.sub(x)?, self.input.std(), change.std())?;
        if prognostic == all {
            return Ok(moved);
        }
        Ok(L::Array::cat(&[&moved, &target.narrow(1, prognostic, all - prognostic)?], 1)?)
    }

    /// Returns whether the channels of inputs are the first ones of targets, normalised alike.
    fn targets_begin_with_inputs(&self) -> bool {
        match self.roles.as_ref().filter(|roles| roles.diagnostic > 0) {
            None => self.input == self.target,
            Some(_) => {
                self.target.mean().starts_with(self.input.mean())
                    && self.target.std().starts_with(self.input.std())
            }
        }
    }

    /// The next state and the output of a step, from the newest frame and what the network makes of it.
    fn advance(&self, x: &L::Array, y: L::Array, several: bool) -> Result<(L::Array, L::Array), BoxError> {
        // In mixed precision the network's output may be of 16 bits; what it is added to and compared with is not.
        let y = y.to_kind(x.kind())?;
        let diagnostic = self.roles.as_ref().map_or(0, |roles| roles.diagnostic) as i64;
        let (y, diagnosed) = match diagnostic {
            0 => (y, None),
            count => {
                let channels = y.shape().get(1).copied().unwrap_or(0);
                if channels <= count {
                    return Err(format!(
                        "the network gives {channels} channels, of which {count} are diagnostic"
                    )
                    .into());
                }
                (y.narrow(1, 0, channels - count)?, Some(y.narrow(1, channels - count, count)?))
            }
        };
        let y = if y.shape() == x.shape() { y.laid_out_as(x)? } else { y };
        if several && y.shape() != x.shape() {
            let (from, to) = (x.shape(), y.shape());
            return Err(
                format!("several steps, or changes, need outputs as inputs, not {to:?} of {from:?}").into()
            );
        }
        let state = match &self.change {
            Some(change) => x.add(&self.scaled(&y, change.std(), self.input.std())?)?,
            None => y,
        };
        let output = match diagnosed {
            Some(diagnosed) => L::Array::cat(&[&state, &diagnosed], 1)?,
            None => state.shallow_clone(),
        };
        Ok((state, output))
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
        // Diagnostic channels are no changes.
        let diagnostic = self.target.std().get(change.std().len()..).unwrap_or_default();
        let scales = [change.std(), diagnostic].concat();
        if scales == self.target.std() {
            return Ok(output.shallow_clone());
        }
        let difference = self.scaled(&output.sub(target)?, self.target.std(), &scales)?;
        Ok(target.add(&difference)?)
    }

    /// Returns the errors of predictions on physical values, of each sample and variable. All ranks of the layout call.
    ///
    /// # Errors
    ///
    /// Another number of channels than variables; an exchange fails.
    pub fn errors_of(
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
        match self.present_in(target)? {
            None => Ok(variable_errors(prediction, target)?),
            Some(mask) => Ok(masked_variable_errors(prediction, target, &mask)?),
        }
    }

    /// Mask of the values of targets that are there; `None` if none can be missing.
    fn present_in(&self, target: &L::Array) -> Result<Option<L::Array>, BoxError> {
        match self.missing {
            None => Ok(None),
            Some(_) => Ok(Some(self.layout.map(target, |local| Ok(present(local)?))?)),
        }
    }

    /// Errors of the energy spectra; points that are missing count as zero in both fields.
    fn spectrum_errors_of(
        &self,
        prediction: &L::Array,
        target: &L::Array,
    ) -> Result<Vec<Vec<f64>>, BoxError> {
        let Some(mask) = self.present_in(target)? else { return Ok(spectrum_errors(prediction, target)?) };
        let (prediction, target) = counted(prediction, target, &mask)?;
        Ok(spectrum_errors(&prediction, &target)?)
    }
}

impl<L, F> FieldTask<L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    /// This rank's samples of a batch.
    fn request(&self, samples: &[usize], steps: usize) -> Result<Request, BoxError> {
        Ok(Request { samples: self.model.layout.own(samples)?.to_vec(), steps })
    }

    /// Predicts samples of `data` after each step, on physical values, in the layout of the fields, without a graph.
    ///
    /// All ranks of the layout call.
    ///
    /// # Errors
    ///
    /// Whatever the network reports; samples that are not there.
    pub fn predict(&self, data: &dyn Samples, samples: &[usize]) -> Result<Vec<L::Array>, BoxError> {
        let _no_grad = tch::no_grad_guard();
        self.model.roll_out_from(self.sample(data, samples, data.steps())?.start, samples.len())
    }

    /// Inputs and what truly comes of them after each step, on physical values, in the layout of the fields.
    ///
    /// All ranks of the layout call.
    ///
    /// # Errors
    ///
    /// Samples that are not there; what an exchange reports.
    pub fn truth(
        &self,
        data: &dyn Samples,
        samples: &[usize],
    ) -> Result<(L::Array, Vec<L::Array>), BoxError> {
        let sample = self.sample(data, samples, data.steps())?;
        let array = |part: &Tensor| -> Result<L::Array, BoxError> {
            Ok(self.model.layout.array(part, samples.len())?)
        };
        let targets = sample.targets.iter().map(array).collect::<Result<_, _>>()?;
        Ok((array(&sample.last)?, targets))
    }

    /// This rank's own part of some samples, split by role.
    fn sample(&self, data: &dyn Samples, samples: &[usize], steps: usize) -> Result<Sample, BoxError> {
        let batch = data.take(&self.request(samples, steps)?)?;
        let mut sample = Roles::arrange(self.model.roles.as_ref(), batch)?;
        sample.start.part = part_of(samples, data.len());
        Ok(sample)
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
        Ok(self.baselines(&*self.validation)?.into_iter().next().unwrap_or_default())
    }

    /// Returns the baseline's errors of rollouts, over all their steps. Empty without rollouts.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    pub fn rollout_baseline(&self) -> Result<Vec<VariableError>, BoxError> {
        let Some(data) = &self.rollouts else { return Ok(Vec::new()) };
        Ok(mean_errors(&self.baselines(&**data)?))
    }

    /// Errors of the baseline after each step, over all samples of `data`.
    fn baselines(&self, data: &dyn Samples) -> Result<Vec<Vec<VariableError>>, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let layout = &self.model.layout;
        let mean = match self.persists() || data.is_empty() {
            true => None,
            false => Some(self.train.mean_target()?),
        };
        let all: Vec<usize> = (0..data.len()).collect();
        let mut errors: Vec<Vec<Vec<VariableError>>> =
            vec![Vec::new(); Roles::steps(self.model.roles.as_ref(), data.steps())];
        let requests = all.chunks(data.at_once()).map(|samples| self.request(samples, data.steps()));
        data.announce(requests.collect::<Result<Vec<Request>, _>>()?);
        for samples in all.chunks(data.at_once()) {
            let batch = self.sample(data, samples, data.steps())?;
            for (target, errors) in batch.targets.iter().zip(&mut errors) {
                let prediction = match &mean {
                    Some(mean) => mean.f_expand_as(target)?,
                    None => batch.last.shallow_clone(),
                };
                let prediction = self.model.filled(&prediction)?;
                let array = |part: &Tensor| layout.array(part, samples.len());
                errors.extend(self.model.errors_of(&array(&prediction)?, &array(target)?)?);
            }
        }
        Ok(errors.iter().map(mean_errors).filter(|errors| !errors.is_empty()).collect())
    }

    /// Terms of the metrics, by sample; of `count` samples, of which `local` is this rank's window of its own.
    fn terms(
        &self,
        prediction: &L::Array,
        (target, local): (&L::Array, &Tensor),
        count: usize,
    ) -> Result<Vec<Vec<f64>>, BoxError> {
        if self.report.metrics().is_empty() {
            return Ok(vec![Vec::new(); count]);
        }
        let lay_out = |local: &Tensor| self.model.layout.array(local, count);
        let present = self.model.missing.map(|_| present(local)).transpose()?;
        let weights = self.weights.of_fields(target, local, present.as_ref(), lay_out)?;
        let forecast: Forecast<L::Array> =
            self.report.forecast(prediction, (target, local), weights, lay_out)?;
        Ok(summands(self.report.metrics(), &forecast)?)
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
        let Sample { mut start, targets, .. } =
            self.sample(&*self.train, samples, self.train.steps_in(step.epoch))?;
        let turned =
            |field: &Tensor| self.model.layout.augmented(field, (self.augment, self.seed), step.epoch, own);
        for frame in &mut start.frames {
            *frame = self.model.input.encode(&turned(frame)?)?;
        }
        for forcing in &mut start.forcings {
            *forcing = turned(forcing)?;
        }
        let targets = targets.iter().map(|target| Ok(self.model.target.encode(&turned(target)?)?));
        let targets = targets.collect::<Result<Vec<Tensor>, BoxError>>()?;
        if let Some(denoising) = self.model.forward.denoising() {
            return self.model.denoising_loss(denoising, (&start, &targets), samples.len(), step);
        }
        let outputs = self.model.steps(&start, samples.len(), Some(step))?;
        let losses = outputs.iter().zip(&targets).map(|(output, target)| {
            let lay_out = |local: &Tensor| self.model.layout.array(local, samples.len());
            let present = match (self.model.missing, &self.model.change, start.frames.last()) {
                (None, ..) => None,
                // A change is known where both fields are.
                (Some(_), Some(_), Some(from)) => Some(present_in_both(target, from)?),
                _ => Some(present(target)?),
            };
            let local = fill(target, self.model.missing.map(|_| 0.0))?;
            let target = lay_out(&local)?;
            let weights = self.weights.of_fields(&target, &local, present.as_ref(), lay_out)?;
            let output = self.model.weighted(output, &target)?;
            Ok(self.loss.weighted(&output, &target, &weights)?.whole()?)
        });
        let losses = losses.collect::<Result<Vec<Tensor>, BoxError>>()?;
        Ok(self.weights.over_steps(&losses)?)
    }

    fn variables(&self) -> Vec<Variable> {
        self.model.variables.clone()
    }

    fn errors(&self, samples: &[usize]) -> Result<Vec<Vec<VariableError>>, BoxError> {
        Ok(self.scored_errors(samples)?.into_iter().map(|scored| scored.errors).collect())
    }

    fn metrics(&self) -> &[MetricKind] {
        self.report.metrics()
    }

    fn rollout_steps(&self) -> usize {
        self.rollouts.as_ref().map_or(0, |data| Roles::steps(self.model.roles.as_ref(), data.steps()))
    }

    fn scored_errors(&self, samples: &[usize]) -> Result<Vec<Scored<Vec<VariableError>>>, BoxError> {
        let Sample { mut start, targets, .. } =
            self.sample(&*self.validation, samples, self.validation.steps())?;
        start.steps = 1;
        let predictions = self.model.roll_out_members(start, samples.len())?;
        let (Some(prediction), Some(local)) = (predictions.first(), targets.first()) else {
            return Ok(Vec::new());
        };
        let target = self.model.layout.array(local, samples.len())?;
        let errors = self.model.errors_of(&single(prediction, &target)?, &target)?;
        let terms = self.terms(prediction, (&target, local), samples.len())?;
        Ok(errors.into_iter().zip(terms).map(|(errors, terms)| Scored { errors, terms }).collect())
    }

    fn announce(&self, coming: Coming, batches: &[&[usize]]) {
        let (data, steps) = match coming {
            Coming::Train(epoch) => (&self.train, self.train.steps_in(epoch)),
            Coming::Validation => (&self.validation, self.validation.steps()),
            Coming::Rollouts => match &self.rollouts {
                Some(data) => (data, data.steps()),
                None => return,
            },
        };
        // What cannot be laid out is an error where it is asked for.
        let requests = batches.iter().map_while(|samples| self.request(samples, steps).ok());
        data.announce(requests.collect());
    }

    fn sharing_ranks(&self) -> usize {
        self.model.layout.sharing_ranks()
    }

    fn idle_ranks(&self) -> Vec<String> {
        self.model.layout.idle_ranks()
    }

    fn rollouts(&self) -> usize {
        self.rollouts.as_ref().map_or(0, |data| data.len())
    }

    fn baseline_errors(&self) -> Result<Option<Baseline>, BoxError> {
        let name = if self.persists() { "predicting no change" } else { "predicting the mean field" };
        let (validation, rollouts) = (self.baseline()?, self.rollout_baseline()?);
        Ok(Some(Baseline { name: name.to_owned(), validation, rollouts }))
    }

    fn rollout_errors(&self, rollouts: &[usize]) -> Result<Vec<RolloutError>, BoxError> {
        Ok(self.scored_rollouts(rollouts)?.into_iter().map(|scored| scored.errors).collect())
    }

    fn scored_rollouts(&self, rollouts: &[usize]) -> Result<Vec<Scored<RolloutError>>, BoxError> {
        let Some(data) = &self.rollouts else { return Ok(Vec::new()) };
        let Sample { start, targets, .. } = self.sample(&**data, rollouts, data.steps())?;
        let steps = targets.len();
        let predictions = self.model.roll_out_members(start, rollouts.len())?;
        let mut of_steps = vec![Vec::with_capacity(steps); rollouts.len()];
        let mut terms = vec![Vec::new(); rollouts.len()];
        let mut spectra = Vec::new();
        for (index, (prediction, local)) in predictions.iter().zip(&targets).enumerate() {
            let target = self.model.layout.array(local, rollouts.len())?;
            let scores = self.terms(prediction, (&target, local), rollouts.len())?;
            terms.iter_mut().zip(scores).for_each(|(all, own)| all.extend(own));
            let prediction = single(prediction, &target)?;
            let errors = self.model.errors_of(&prediction, &target)?;
            of_steps.iter_mut().zip(errors).for_each(|(all, error)| all.push(error));
            if index + 1 == steps {
                spectra = self.model.spectrum_errors_of(&prediction, &target)?;
            }
        }
        let errors = of_steps.iter().zip(spectra).zip(terms);
        Ok(errors
            .map(|((steps, spectra), terms)| Scored {
                errors: RolloutError { variables: mean_errors(steps), spectra },
                terms,
            })
            .collect())
    }
}

/// The forecast itself, or the mean of an ensemble.
fn single<A: Array>(prediction: &A, target: &A) -> crate::Result<A> {
    match is_ensemble(prediction, target) {
        true => ensemble_mean(prediction),
        false => Ok(prediction.shallow_clone()),
    }
}

/// Which part of an evaluation of `total` samples these are, if they follow each other.
fn part_of(samples: &[usize], total: usize) -> Option<BatchPart> {
    let first = *samples.first()?;
    let follow = samples.iter().enumerate().all(|(index, &sample)| sample == first + index);
    follow.then_some(BatchPart { offset: first as i64, total: total as i64 })
}

/// A rank's share of `count` samples: a contiguous range; the first ranks take one more where it does not come out even.
pub(crate) fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let start = |rank: usize| rank * (count / ranks) + rank.min(count % ranks);
    start(rank)..start(rank + 1)
}
