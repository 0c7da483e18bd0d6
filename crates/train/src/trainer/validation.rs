//! Validation, and what is said after an epoch.

use isobar_collectives::Group;
use isobar_collectives::flight::Phase;

use super::Run;
use super::best::{Best, nothing_counts};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::metric::{MetricKind, Scores, values, width};
use crate::task::{BoxError, Coming, RolloutError, Scored, Task, share};
use crate::variables::{
    MOMENTS, Variable, VariableError, columns, errors_line, mean_relative, means, moments, no_better_than,
    percent, significant, spectrum_columns,
};

/// Errors after an epoch, over all ranks.
#[derive(Debug, Clone, Default)]
pub(super) struct Validation {
    /// Errors of the validation samples, by variable.
    pub(super) errors: Option<Vec<VariableError>>,
    /// Errors of the rollouts, by variable.
    pub(super) rollout: Option<RolloutError>,
    /// Metrics of the validation samples; without any if none are reported.
    pub(super) scores: Option<Scores>,
    /// Metrics of the rollouts, by step.
    pub(super) rollout_scores: Vec<Scores>,
}

impl Validation {
    /// Number by which checkpoints are compared: the lower the better.
    pub(super) fn cost(&self, best: Option<Best>, task: &impl Task) -> Option<f64> {
        match best {
            None => self.error(),
            Some(best) => self.scores.as_ref().map(|scores| best.cost(task.metrics(), scores)),
        }
    }

    /// Mean of the relative errors.
    fn error(&self) -> Option<f64> {
        self.errors.as_deref().map(mean_relative)
    }
}

/// Names of all metrics of a run of these variables, validated with or without rollouts.
pub(super) fn metric_columns(variables: &[Variable], task: &impl Task) -> Vec<String> {
    let rollouts = task.rollouts() > 0;
    let fixed = super::COLUMNS.map(str::to_owned).into_iter();
    let kinds = if rollouts { &["validation", "rollout"][..] } else { &["validation"] };
    let each = kinds.iter().flat_map(|kind| columns(kind, variables).flatten());
    let spectra = spectrum_columns(variables).filter(|_| rollouts);
    let steps = if rollouts { task.rollout_steps() } else { 0 };
    let names = |place: String| score_columns(place, task.metrics(), variables);
    let scores = names("validation".to_owned()).into_iter();
    let rollout_scores = (1..=steps).flat_map(|step| names(rollout_place(step)));
    fixed.chain(each).chain(spectra).chain(scores).chain(rollout_scores).collect()
}

/// Columns of metrics, by metric and variable.
fn score_columns(place: String, metrics: &[MetricKind], variables: &[Variable]) -> Vec<String> {
    let of_metric = |metric: &MetricKind| {
        let column = |(at, variable): (usize, &Variable)| match (variable.name.is_empty(), at) {
            (false, _) => format!("{place}/{}/{}", metric.name(), variable.key()),
            (true, 0) => format!("{place}/{}", metric.name()),
            (true, at) => format!("{place}/{}/{at}", metric.name()),
        };
        variables.iter().enumerate().map(column).collect::<Vec<_>>()
    };
    metrics.iter().flat_map(of_metric).collect()
}

fn rollout_place(step: usize) -> String {
    format!("rollout/step_{step}")
}

impl<T: Task> Run<'_, T> {
    /// Validates the averaged parameters if averaging is on, with the buffers of rank 0, and stores the errors.
    pub(super) fn validated(&mut self) -> Result<Validation> {
        self.parallel.share_buffers()?;
        self.swap_averages()?;
        let (errors, scores) = self.validate()?.unzip();
        let (rollout, rollout_scores) = self.validate_rollouts()?.unzip();
        let validation = Validation {
            errors,
            rollout,
            scores: scores.flatten(),
            rollout_scores: rollout_scores.unwrap_or_default(),
        };
        self.swap_averages()?;
        if self.summary.variable_errors.is_empty() {
            let errors = validation.errors.as_deref().unwrap_or_default();
            self.warn_of_zero_truth(errors);
            let best = (self.config.train.best.as_str(), self.best);
            let nothing = nothing_counts(best, &self.variables, errors, validation.scores.as_ref());
            if let Some(warning) = nothing.filter(|_| self.ranks.world.rank() == 0) {
                tracing::warn!("{warning}");
            }
        }
        self.validated_at = Some(self.state.step);
        self.summary.validation_error = validation.error();
        self.summary.variable_errors = validation.errors.clone().unwrap_or_default();
        self.summary.rollout_error = validation.rollout.clone();
        self.summary.scores = validation.scores.clone();
        self.summary.rollout_scores = validation.rollout_scores.clone();
        Ok(validation)
    }

    /// Names the variables that the mean over variables leaves out.
    fn warn_of_zero_truth(&self, errors: &[VariableError]) {
        let named = self.variables.iter().zip(errors);
        let zero = named.filter(|(_, error)| !error.relative.is_finite() && error.rmse.is_finite());
        let names: Vec<&str> = zero.map(|(variable, _)| &*variable.name).collect();
        if self.ranks.world.rank() == 0 && !names.is_empty() {
            tracing::warn!(
                "relative errors of {} are infinite, since a validation sample is zero there: the validation error leaves \
                 them out; see their RMSE",
                names.join(", ")
            );
        }
    }

    /// Warns of variables that are predicted no better than by the task's baseline. All ranks call.
    pub(super) fn warn_of_baseline(&self) -> Result<()> {
        let failed = |source| Error::Task { context: "the baseline", source };
        let Some(baseline) = self.task.baseline_errors().map_err(failed)? else { return Ok(()) };
        let rollout = self.summary.rollout_error.as_ref().map_or(&[][..], |rollout| &rollout.variables[..]);
        let pairs = [
            (&self.summary.variable_errors[..], &baseline.validation, "on the validation samples"),
            (rollout, &baseline.rollouts, "over the rollouts"),
        ];
        for (errors, of_baseline, what) in pairs {
            let found = no_better_than(&self.variables, errors, of_baseline, &baseline.name, what);
            if let Some(warning) = found.filter(|_| self.ranks.world.rank() == 0) {
                tracing::warn!("{warning}");
            }
        }
        Ok(())
    }

    /// Exchanges parameters and their averages.
    pub(super) fn swap_averages(&mut self) -> Result<()> {
        if !self.optimizer.averages() {
            return Ok(());
        }
        self.optimizer.swap()?;
        self.parallel.changed()
    }

    /// Means of the validation samples' errors, and metrics, over all ranks.
    fn validate(&mut self) -> Result<Option<(Vec<VariableError>, Option<Scores>)>> {
        let samples = self.task.validation_samples();
        let errors = MOMENTS * self.variables.len();
        let task = self.task;
        let width = errors + width(task.metrics(), self.variables.len());
        let sums = self.sums((samples, Coming::Validation), width, |samples| {
            let numbers = |scored: &Scored<Vec<VariableError>>| {
                moments(&scored.errors).chain(scored.terms.iter().copied()).collect()
            };
            Ok(task.scored_errors(samples)?.iter().map(numbers).collect())
        })?;
        Ok(sums.map(|sums| {
            let (errors, terms) = sums.split_at(errors);
            (means(errors), self.scores(terms).into_iter().next())
        }))
    }

    /// Means of the rollouts' errors, and metrics after each step, over all ranks.
    fn validate_rollouts(&mut self) -> Result<Option<(RolloutError, Vec<Scores>)>> {
        let rollouts = self.task.rollouts();
        let errors = MOMENTS * self.variables.len();
        let spectra = errors + 2 * self.variables.len();
        let task = self.task;
        let width = spectra + task.rollout_steps() * width(task.metrics(), self.variables.len());
        let sums = self.sums((rollouts, Coming::Rollouts), width, |rollouts| {
            let numbers = |scored: &Scored<RolloutError>| {
                let of = &scored.errors;
                let numbers = moments(&of.variables).chain(of.spectra.iter().flat_map(counted));
                numbers.chain(scored.terms.iter().copied()).collect()
            };
            Ok(task.scored_rollouts(rollouts)?.iter().map(numbers).collect())
        })?;
        Ok(sums.map(|sums| {
            let error = RolloutError {
                variables: means(&sums[..errors]),
                spectra: sums[errors..spectra].chunks_exact(2).map(mean).collect(),
            };
            (error, self.scores(&sums[spectra..]))
        }))
    }

    /// Metrics from the sums of their summands over samples, by step.
    fn scores(&self, sums: &[f64]) -> Vec<Scores> {
        let (metrics, channels) = (self.task.metrics(), self.variables.len());
        let steps = sums.chunks(width(metrics, channels).max(1)).enumerate();
        steps.map(|(at, sums)| Scores { step: at + 1, metrics: values(metrics, channels, sums) }).collect()
    }

    /// Tells the task which samples the next validation asks for.
    pub(super) fn announce_validation(&self) {
        let validation = (self.task.validation_samples(), Coming::Validation);
        for (count, coming) in [validation, (self.task.rollouts(), Coming::Rollouts)] {
            let (own, at_once) = self.own_validated(count);
            self.task.announce(coming, &own.chunks(at_once).collect::<Vec<_>>());
        }
    }

    /// This rank's share of `count` samples of validation, and how many it takes at once.
    fn own_validated(&self, count: usize) -> (Vec<usize>, usize) {
        let data = &self.ranks.data;
        // As many as in a micro-batch of training.
        let TrainConfig { batch_size, accumulate, .. } = self.config.train;
        let at_once = batch_size.div_ceil(data.size()).div_ceil(accumulate).max(1);
        (share(count, data.rank(), data.size()).collect(), at_once)
    }

    /// Sums of `width` numbers of each sample, over all ranks; nothing of no samples.
    fn sums(
        &mut self,
        (count, coming): (usize, Coming),
        width: usize,
        numbers: impl Fn(&[usize]) -> Result<Vec<Vec<f64>>, BoxError>,
    ) -> Result<Option<Vec<f64>>> {
        if count == 0 {
            return Ok(None);
        }
        self.mark(Phase::Validation);
        let data = &self.ranks.data.clone();
        let (own, at_once) = self.own_validated(count);
        self.task.announce(coming, &own.chunks(at_once).collect::<Vec<_>>());
        let mut sums = vec![0.0; width];
        let _no_grad = tch::no_grad_guard();
        let _precision = self.precision()?;
        for (index, samples) in own.chunks(at_once).enumerate() {
            self.progress.validation(index * at_once, own.len());
            let all = numbers(samples).map_err(|source| Error::Task { context: "validation", source })?;
            if let Some(sample) = all.iter().find(|sample| sample.len() != width) {
                return Err(Error::invalid(
                    "the number of errors of a sample",
                    format!("{} numbers", sample.len()),
                    format!(
                        "{width}: {MOMENTS} for each variable of `Task::variables`, two more for its spectrum in a rollout, and \
                         those of `Task::metrics`"
                    ),
                ));
            }
            for sample in all {
                sums.iter_mut().zip(sample).for_each(|(sum, number)| *sum += number);
            }
        }
        Ok(Some(sums_over(data, sums)?))
    }

    /// Shows and records the loss and errors after an epoch.
    pub(super) fn report(&mut self, epoch: u64, loss: f64, validation: &Validation) -> Result<()> {
        let (mut values, errors) = self.described(validation);
        values.insert(0, ("epoch_loss".to_owned(), loss));
        self.progress.epoch_end(epoch, &format!("loss {}{errors}", significant(loss)));
        self.record_all(epoch, &values)
    }

    /// Records the errors of a validation within an epoch.
    pub(super) fn record_validation(&mut self, validation: &Validation) -> Result<()> {
        let (values, _) = self.described(validation);
        self.record_all(self.state.epoch, &values)
    }

    fn record_all(&mut self, epoch: u64, values: &[(String, f64)]) -> Result<()> {
        let values: Vec<(&str, f64)> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        self.record(epoch, &values)
    }

    /// The numbers of a validation by the names of metrics, and in words.
    fn described(&self, validation: &Validation) -> (Vec<(String, f64)>, String) {
        let mut values = Vec::new();
        let mut line = String::new();
        let named = |kind: &'static str, errors: &[VariableError]| -> Vec<(String, f64)> {
            let named = self.variables.iter().zip(errors).filter(|(variable, _)| !variable.name.is_empty());
            let numbers = named.map(|(_, error)| (!error.missing).then_some([error.relative, error.rmse]));
            let known =
                columns(kind, &self.variables).zip(numbers).filter_map(|(of, numbers)| Some((of, numbers?)));
            known.flat_map(|(of, numbers)| of.into_iter().zip(numbers)).collect()
        };
        if let Some(errors) = &validation.errors {
            values.push(("validation_error".to_owned(), mean_relative(errors)));
            values.extend(named("validation", errors));
            line.push_str(&format!("  validation error {}", errors_line(&self.variables, errors)));
        }
        if let Some(rollout) = &validation.rollout {
            values.push(("rollout_error".to_owned(), rollout.error()));
            values.push(("spectrum_error".to_owned(), rollout.spectrum()));
            values.extend(named("rollout", &rollout.variables));
            let spectra = self.variables.iter().zip(&rollout.spectra);
            let spectra = spectra.filter(|(variable, _)| !variable.name.is_empty()).map(|(_, error)| *error);
            let known = spectrum_columns(&self.variables).zip(spectra);
            values.extend(known.filter_map(|(column, error)| Some((column, error?))));
            let errors = errors_line(&self.variables, &rollout.variables);
            line.push_str(&format!("  rollout {errors}, spectrum {}", percent(rollout.spectrum())));
        }
        let places = validation.scores.iter().map(|scores| ("validation".to_owned(), scores));
        let steps = validation.rollout_scores.iter().map(|scores| (rollout_place(scores.step), scores));
        for (place, scores) in places.chain(steps) {
            let numbers = scores.metrics.iter().flat_map(|(_, values)| values.iter().copied());
            let columns = score_columns(place, self.task.metrics(), &self.variables).into_iter();
            values.extend(columns.zip(numbers).filter_map(|(column, value)| Some((column, value?))));
        }
        (values, line)
    }
}

/// Returns `[number, 1]`, or `[0, 0]` for `None`.
fn counted(number: &Option<f64>) -> [f64; 2] {
    number.map_or([0.0; 2], |number| [number, 1.0])
}

/// The mean over samples of what [`counted`] summed; `None` of none.
fn mean(sums: &[f64]) -> Option<f64> {
    (sums[1] > 0.0).then(|| sums[0] / sums[1])
}

/// Sums in rank order: the same to the last bit on every rank.
fn sums_over(group: &Group, own: Vec<f64>) -> Result<Vec<f64>> {
    if group.size() == 1 {
        return Ok(own);
    }
    let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
    let mut sums = vec![0.0; own.len()];
    for bytes in group.all_gather_bytes(&bytes)? {
        let numbers =
            bytes.chunks_exact(8).filter_map(|chunk| Some(f64::from_le_bytes(chunk.try_into().ok()?)));
        sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
    }
    Ok(sums)
}
