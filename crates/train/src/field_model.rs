//! A network from field to field, with its scales: rollouts, losses and errors of its forecasts.

use std::collections::VecDeque;

use isobar_array::{Array, Convert, Elementwise, Generator, Local, Shape};
use isobar_data::Normalizer;
use isobar_models::{Batch, Denoiser};
use tch::Tensor;

use crate::error::Result;
use crate::fields::FieldLayout;
use crate::loss::missing::{counted, fill, present};
use crate::loss::{ensemble_mean, masked_variable_errors, spectrum_errors, variable_errors};
use crate::model::{Forward, Regression};
use crate::objective::{Inputs, ObjectiveArray, Surrogate};
use crate::rollout::{Roles, Start};
use crate::task::{BoxError, Step};
use crate::variables::{Variable, VariableError};

/// Inputs of a network, and the prediction of the regression before it.
type Regressed<A> = (Batch<A>, Option<A>);

/// A network that maps one field to the next: from an input to a target, or from a frame of a trajectory to the following one,
/// over and over. Inputs and targets are normalised for it.
pub struct FieldModel<L, F> {
    /// The network: normalised inputs, `[sample, channel, x, y]`, to normalised outputs; the step while training,
    /// `None` for evaluation.
    pub forward: F,
    /// Layout of the fields; its [`targets`](FieldLayout::targets) is that of targets and outputs.
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
    pub fn roll_out_members(&self, start: Start, count: usize) -> Result<Vec<L::Array>, BoxError> {
        let mut outputs = Vec::with_capacity(start.steps);
        self.roll_out_each(start, count, |_, fields| {
            outputs.push(fields);
            Ok(())
        })?;
        Ok(outputs)
    }

    /// Does the same as [`roll_out_members`](Self::roll_out_members), and hands the index and the fields of each step to `each` before
    /// it computes the next: memory holds one step of a long rollout.
    ///
    /// # Errors
    ///
    /// Whatever the network or `each` reports.
    pub fn roll_out_each(
        &self,
        mut start: Start,
        count: usize,
        mut each: impl FnMut(usize, L::Array) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let _no_grad = tch::no_grad_guard();
        let dims = start.frames.first().map_or(0, Tensor::dim);
        for frame in &mut start.frames {
            *frame = self.input.encode(frame)?;
        }
        let decode = |part: &Tensor| match part.dim() > dims {
            // Members beside each other, as samples are.
            true => Ok(self.target.decode(&part.f_flatten(0, 1)?)?.f_view_as(part)?),
            false => Ok(self.target.decode(part)?),
        };
        self.each_step(&start, count, None, |at, y| each(at, self.layout.map(&y, decode)?))
    }

    /// Hands the normalised outputs after each step to `each`, from normalised frames.
    fn each_step(
        &self,
        start: &Start,
        count: usize,
        step: Option<Step<'_>>,
        mut each: impl FnMut(usize, L::Array) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
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
        let (objective, generator) = (self.forward.objective(), Generator::new(self.forward.seed()));
        for at in 0..start.steps {
            let batch = self.batch((start, at), &frames, positions.as_ref(), count)?;
            let y = match step {
                Some(_) => self.forward.forward(batch, step)?,
                None => {
                    let network = self.on_batch(start, count);
                    let inputs = Inputs::of_evaluation(&network, batch, (&generator, start.part));
                    L::Array::prediction_of(&*objective, inputs)?
                }
            };
            let Some(x) = frames.pop_front() else { break };
            let newest = frames.back().unwrap_or(&x);
            let (state, output) = self.advance(newest, y, several)?;
            frames.push_back(self.still_missing(state, kept.as_ref())?);
            each(at, output)?;
        }
        Ok(())
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

    /// Returns the network on normalised frames.
    pub(crate) fn on_batch<'a>(&'a self, start: &'a Start, count: usize) -> OnBatch<'a, L, F> {
        OnBatch { model: self, start, count }
    }

    /// Computes the network's regularization term times a weight; `None` if it has none.
    pub(crate) fn regularization(&self, weight: f64) -> Result<Option<Tensor>, BoxError> {
        let Some(term) = self.forward.regularization()? else { return Ok(None) };
        Ok(Some(term.mul_scalar(weight)?.full_tensor()?))
    }

    /// Returns the inputs of the second of two stages, and the prediction of the regression before it, if there is one.
    fn regressed(&self, inputs: Batch<L::Array>) -> Result<Regressed<L::Array>, BoxError> {
        let Some(regression) = self.forward.regression() else { return Ok((inputs, None)) };
        if self.change.is_some() {
            return Err("a first stage predicts fields, not changes; --set data.predict=frame".into());
        }
        let (inputs, mean) = regression.apply(inputs, [&self.input, &self.target])?;
        Ok((inputs, Some(mean)))
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
        // Ensembles, which have a dim of members, are of one step.
        if y.shape().len() > x.shape().len() {
            if self.change.is_some() {
                return Err(
                    "a network that returns an ensemble predicts fields, not changes; --set data.predict=frame".into()
                );
            }
            return Ok((y.shallow_clone(), y));
        }
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
        let y = if y.shape() == x.shape() { y.redistribute_like(x)? } else { y };
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
        let factors = factors(by, of);
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(fields.shallow_clone());
        }
        let scale = Normalizer::of_scales(&factors)?;
        self.layout.map(fields, |part| Ok(scale.decode(part)?))
    }

    /// Returns factors of the differences between outputs and normalised targets in the loss, `[1, channel, 1…]`; `None` if they are
    /// all 1. If the network predicts changes, differences are in units of each variable's changes, since slowly changing variables
    /// would not count otherwise.
    fn loss_scales(&self, target: &L::Array) -> Result<Option<L::Array>, BoxError> {
        let Some(change) = &self.change else { return Ok(None) };
        // Diagnostic channels are no changes.
        let diagnostic = self.target.std().get(change.std().len()..).unwrap_or_default();
        let scales = [change.std(), diagnostic].concat();
        if scales == self.target.std() {
            return Ok(None);
        }
        let factors = Tensor::f_from_slice(&factors(self.target.std(), &scales))?;
        let mut view = vec![1; target.shape().len()];
        if let Some(extent) = view.get_mut(1) {
            *extent = -1;
        }
        Ok(Some(target.constant(&factors.f_view(&view[..])?.f_to_kind(target.kind())?)?))
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
    pub(crate) fn spectrum_errors_of(
        &self,
        prediction: &L::Array,
        target: &L::Array,
    ) -> Result<Vec<Vec<f64>>, BoxError> {
        let Some(mask) = self.present_in(target)? else { return Ok(spectrum_errors(prediction, target)?) };
        let (prediction, target) = counted(prediction, target, &mask)?;
        Ok(spectrum_errors(&prediction, &target)?)
    }
}

/// Returns `by` / `of` for each channel; either may hold one number for all channels.
fn factors(by: &[f64], of: &[f64]) -> Vec<f64> {
    let at = |all: &[f64], channel: usize| all.get(channel).or(all.first()).copied().unwrap_or(1.0);
    (0..by.len().max(of.len())).map(|channel| at(by, channel) / at(of, channel)).collect()
}

/// A [`FieldModel`] on normalised frames of so many samples.
pub(crate) struct OnBatch<'a, L, F> {
    model: &'a FieldModel<L, F>,
    start: &'a Start,
    count: usize,
}

impl<L, F> OnBatch<'_, L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    /// The newest input frame.
    fn newest(&self) -> Result<&Tensor, BoxError> {
        self.start.frames.last().ok_or_else(|| "a rollout starts from no frame".into())
    }

    /// A frame without missing values.
    fn filled(&self, frame: &Tensor) -> Result<L::Array, BoxError> {
        Ok(self.model.layout.array(&fill(frame, self.model.missing)?, self.count)?)
    }
}

impl<L, F> Surrogate<L::Array> for OnBatch<'_, L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    fn forward(&self, batch: Batch<L::Array>, step: Option<Step<'_>>) -> Result<L::Array, BoxError> {
        self.model.forward.forward(batch, step)
    }

    fn first(&self) -> Result<Batch<L::Array>, BoxError> {
        let frames = self.start.frames.iter().map(|frame| self.filled(frame)).collect::<Result<_, _>>()?;
        let positions = self.model.positions_of(self.newest()?, self.count)?;
        self.model.batch((self.start, 0), &frames, positions.as_ref(), self.count)
    }

    fn roll_out(&self, step: Step<'_>) -> Result<Vec<L::Array>, BoxError> {
        let mut outputs = Vec::with_capacity(self.start.steps);
        self.model.each_step(self.start, self.count, Some(step), |_, output| {
            outputs.push(output);
            Ok(())
        })?;
        Ok(outputs)
    }

    fn output_for(&self, target: &L::Array) -> Result<L::Array, BoxError> {
        match &self.model.change {
            Some(change) => self.model.change_to(target, &self.filled(self.newest()?)?, change),
            None => Ok(target.shallow_clone()),
        }
    }

    fn loss_scales(&self, target: &L::Array) -> Result<Option<L::Array>, BoxError> {
        self.model.loss_scales(target)
    }

    fn physical(&self, outputs: &L::Array) -> Result<L::Array, BoxError> {
        self.model.layout.map(outputs, |part| Ok(self.model.target.decode(part)?))
    }

    fn staged(&self, inputs: Batch<L::Array>) -> Result<Regressed<L::Array>, BoxError> {
        self.model.regressed(inputs)
    }

    fn mean_channels(&self) -> i64 {
        let is_input = self.model.forward.regression().is_some_and(Regression::is_input);
        if is_input { self.model.variables.len() as i64 } else { 0 }
    }

    fn outputs(&self) -> usize {
        self.model.variables.len()
    }

    fn denoiser(&self) -> Option<Denoiser> {
        self.model.forward.denoiser()
    }

    fn has_conditions(&self) -> bool {
        self.model.forward.has_conditions()
    }
}
