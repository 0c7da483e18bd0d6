//! The task of a network from field to field: its data, loss and metrics.

use isobar_array::{Array, Local};
use isobar_data::{Augment, Request, Samples};
use isobar_manager::DeviceMesh;
use isobar_models::BatchPart;
use tch::Tensor;

use crate::error::Result;
use crate::field_model::FieldModel;
use crate::fields::FieldLayout;
use crate::loss::missing::{fill, present, present_in_both};
use crate::loss::{LossKind, ensemble_mean, is_ensemble};
use crate::metric::{Forecast, MetricKind, Report, summands};
use crate::model::Forward;
use crate::objective::{ObjectiveArray, Target, Training};
use crate::rollout::{Roles, Sample};
use crate::task::{Baseline, BoxError, Coming, RolloutError, Scored, Step, Task};
use crate::variables::{Variable, VariableError, mean_errors};
use crate::weights::Weights;

/// A [`FieldModel`] with its data, in memory or read while they are needed.
///
/// The loss is that of the network's [objective](crate::objective::Objective), on normalised values; if the network predicts
/// changes, the difference from the target is in units of each variable's changes. Validation errors are per variable, on
/// physical values.
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
        let layout = &self.model.layout;
        let target = |part: &Tensor| -> Result<L::Array, BoxError> {
            Ok(layout.targets().array(part, samples.len())?)
        };
        let targets = sample.targets.iter().map(target).collect::<Result<_, _>>()?;
        Ok((layout.array(&sample.last, samples.len())?, targets))
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
        let mut steps = self.baselines(&*self.validation)?.into_iter();
        Ok(steps.next().map(|samples| mean_errors(&samples)).unwrap_or_default())
    }

    /// Returns the baseline's errors of rollouts: as a network's, means over rollouts of the means over their steps. Empty without
    /// rollouts.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    pub fn rollout_baseline(&self) -> Result<Vec<VariableError>, BoxError> {
        let Some(data) = &self.rollouts else { return Ok(Vec::new()) };
        let steps = self.baselines(&**data)?;
        let of_rollout =
            |rollout: usize| mean_errors(steps.iter().filter_map(|samples| samples.get(rollout)));
        let rollouts: Vec<Vec<VariableError>> = (0..data.len()).map(of_rollout).collect();
        Ok(mean_errors(&rollouts))
    }

    /// Errors of the baseline after each step, of each sample of `data`.
    fn baselines(&self, data: &dyn Samples) -> Result<Vec<Vec<Vec<VariableError>>>, BoxError> {
        let _no_grad = tch::no_grad_guard();
        let layout = self.model.layout.targets();
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
        Ok(errors)
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
        let lay_out = |local: &Tensor| self.model.layout.targets().array(local, count);
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
        let turned_on =
            |layout: &L, field: &Tensor| layout.augmented(field, (self.augment, self.seed), step.epoch, own);
        let turned = |field: &Tensor| turned_on(&self.model.layout, field);
        for frame in &mut start.frames {
            *frame = self.model.input.encode(&turned(frame)?)?;
        }
        for forcing in &mut start.forcings {
            *forcing = turned(forcing)?;
        }
        let layout = self.model.layout.targets();
        let targets =
            targets.iter().map(|target| Ok(self.model.target.encode(&turned_on(layout, target)?)?));
        let targets = targets.collect::<Result<Vec<Tensor>, BoxError>>()?;
        let targets = targets.iter().map(|target| {
            let lay_out = |local: &Tensor| layout.array(local, samples.len());
            let present = match (self.model.missing, &self.model.change, start.frames.last()) {
                (None, ..) => None,
                // A change is known where both fields are.
                (Some(_), Some(_), Some(from)) => Some(present_in_both(target, from)?),
                _ => Some(present(target)?),
            };
            let local = fill(target, self.model.missing.map(|_| 0.0))?;
            let fields = lay_out(&local)?;
            let weights = self.weights.of_fields(&fields, &local, present.as_ref(), lay_out)?;
            Ok(Target { fields, weights })
        });
        let targets = targets.collect::<Result<Vec<Target<L::Array>>, BoxError>>()?;
        let network = self.model.on_batch(&start, samples.len());
        let training = Training::new(&network, step, targets, (&self.loss, &self.weights));
        Ok(L::Array::loss_of(&*self.model.forward.objective(), &training)?.full_tensor()?)
    }

    fn regularization(&self) -> Result<Option<Tensor>, BoxError> {
        match self.weights.regularization() {
            0.0 => Ok(None),
            weight => self.model.regularization(weight),
        }
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
        let target = self.model.layout.targets().array(local, samples.len())?;
        let errors = self.model.errors_of(&single(prediction, &target)?, &target)?;
        let terms = self.terms(prediction, (&target, local), samples.len())?;
        Ok(errors.into_iter().zip(terms).map(|(errors, terms)| Scored { errors, terms }).collect())
    }

    fn announce(&self, coming: Coming, batches: &[&[usize]]) {
        let (data, steps) = match coming {
            Coming::Train(epoch) | Coming::NextEpoch(epoch) => (&self.train, self.train.steps_in(epoch)),
            Coming::Validation => (&self.validation, self.validation.steps()),
            Coming::Rollouts => match &self.rollouts {
                Some(data) => (data, data.steps()),
                None => return,
            },
        };
        // What cannot be laid out is an error where it is asked for.
        let requests = batches.iter().map_while(|samples| self.request(samples, steps).ok()).collect();
        match coming {
            Coming::NextEpoch(_) => data.announce_after(requests),
            _ => data.announce(requests),
        }
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
        let mut of_steps = vec![Vec::with_capacity(steps); rollouts.len()];
        let mut terms = vec![Vec::new(); rollouts.len()];
        let mut spectra = Vec::new();
        self.model.roll_out_each(start, rollouts.len(), |index, prediction| {
            let Some(local) = targets.get(index) else { return Ok(()) };
            let target = self.model.layout.targets().array(local, rollouts.len())?;
            let scores = self.terms(&prediction, (&target, local), rollouts.len())?;
            terms.iter_mut().zip(scores).for_each(|(all, own)| all.extend(own));
            let prediction = single(&prediction, &target)?;
            let errors = self.model.errors_of(&prediction, &target)?;
            of_steps.iter_mut().zip(errors).for_each(|(all, error)| all.push(error));
            if index + 1 == steps {
                let last = of_steps.iter().map(|steps| steps.last());
                let known = |(errors, of): (Vec<f64>, Option<&Vec<VariableError>>)| {
                    let missing = of.into_iter().flatten().map(|error| error.missing);
                    errors
                        .into_iter()
                        .zip(missing)
                        .map(|(error, missing)| (!missing).then_some(error))
                        .collect()
                };
                let errors = self.model.spectrum_errors_of(&prediction, &target)?;
                spectra = errors.into_iter().zip(last).map(known).collect::<Vec<Vec<_>>>();
            }
            Ok(())
        })?;
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

/// Returns the part of an evaluation of `total` samples that these are, if they follow each other.
fn part_of(samples: &[usize], total: usize) -> Option<BatchPart> {
    let first = *samples.first()?;
    let follow = samples.iter().enumerate().all(|(index, &sample)| sample == first + index);
    follow.then_some(BatchPart { offset: first as i64, total: total as i64 })
}
