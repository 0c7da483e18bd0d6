//! Validation, and what is said after an epoch.

use isobar_collectives::Group;
use isobar_collectives::flight::Phase;

use super::Run;
use crate::error::{Error, Result};
use crate::task::{BoxError, RolloutError, Task, share};
use crate::variables::{
    Variable, VariableError, columns, errors_line, mean_relative, means, moments, no_better_than, percent,
    significant, spectrum_columns,
};

/// Errors after an epoch, over all ranks.
#[derive(Debug, Clone, Default)]
pub(super) struct Validation {
    /// Errors of the validation samples, by variable.
    pub(super) errors: Option<Vec<VariableError>>,
    /// Errors of the rollouts, by variable.
    pub(super) rollout: Option<RolloutError>,
}

impl Validation {
    /// Number by which checkpoints are compared.
    pub(super) fn error(&self) -> Option<f64> {
        self.errors.as_deref().map(mean_relative)
    }
}

/// Names of all metrics of a run of these variables, validated with or without rollouts.
pub(super) fn metric_columns(variables: &[Variable], rollouts: bool) -> Vec<String> {
    let fixed = super::COLUMNS.map(str::to_owned).into_iter();
    let kinds = if rollouts { &["validation", "rollout"][..] } else { &["validation"] };
    let each = kinds.iter().flat_map(|kind| columns(kind, variables).flatten());
    let spectra = spectrum_columns(variables).filter(|_| rollouts);
    fixed.chain(each).chain(spectra).collect()
}

impl<T: Task> Run<'_, T> {
    /// Validates the averaged parameters if averaging is on, and stores the errors.
    pub(super) fn validated(&mut self) -> Result<Validation> {
        self.swap_averages()?;
        let validation = Validation { errors: self.validate()?, rollout: self.validate_rollouts()? };
        self.swap_averages()?;
        if self.summary.variable_errors.is_empty() {
            self.warn_of_zero_truth(validation.errors.as_deref().unwrap_or_default());
        }
        self.summary.validation_error = validation.error();
        self.summary.variable_errors = validation.errors.clone().unwrap_or_default();
        self.summary.rollout_error = validation.rollout.clone();
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

    /// Means of the validation samples' errors, over all ranks.
    fn validate(&mut self) -> Result<Option<Vec<VariableError>>> {
        let samples = self.task.validation_samples();
        let width = 2 * self.variables.len();
        let task = self.task;
        let sums = self.sums(samples, width, |samples| {
            let errors = task.errors(samples)?;
            Ok(errors.iter().map(|sample| moments(sample).collect()).collect())
        })?;
        Ok(sums.map(|sums| means(&sums, samples)))
    }

    /// Means of the rollouts' errors, over all ranks.
    fn validate_rollouts(&mut self) -> Result<Option<RolloutError>> {
        let rollouts = self.task.rollouts();
        let width = 2 * self.variables.len();
        let task = self.task;
        let sums = self.sums(rollouts, width + width / 2, |rollouts| {
            let errors = task.rollout_errors(rollouts)?;
            let numbers =
                |of: &RolloutError| moments(&of.variables).chain(of.spectra.iter().copied()).collect();
            Ok(errors.iter().map(numbers).collect())
        })?;
        Ok(sums.map(|sums| RolloutError {
            variables: means(&sums[..width], rollouts),
            spectra: sums[width..].iter().map(|sum| sum / rollouts as f64).collect(),
        }))
    }

    /// Sums of `width` numbers of each sample, over all ranks; nothing of no samples.
    fn sums(
        &mut self,
        count: usize,
        width: usize,
        numbers: impl Fn(&[usize]) -> Result<Vec<Vec<f64>>, BoxError>,
    ) -> Result<Option<Vec<f64>>> {
        if count == 0 {
            return Ok(None);
        }
        self.mark(Phase::Validation);
        let data = &self.ranks.data.clone();
        let own: Vec<usize> = share(count, data.rank(), data.size()).collect();
        let at_once = self.config.train.batch_size.div_ceil(data.size()).max(1);
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
                        "{width}: two for each variable of `Task::variables`, and one more for its spectrum in a rollout"
                    ),
                ));
            }
            for sample in all {
                sums.iter_mut().zip(sample).for_each(|(sum, number)| *sum += number);
            }
        }
        Ok(Some(sums_over(data, sums)?))
    }

    pub(super) fn report(&mut self, epoch: u64, loss: f64, validation: &Validation) -> Result<()> {
        let mut values = vec![("epoch_loss".to_owned(), loss)];
        let mut line = format!("loss {}", significant(loss));
        let named = |kind: &'static str, errors: &[VariableError]| -> Vec<(String, f64)> {
            let named = self.variables.iter().zip(errors).filter(|(variable, _)| !variable.name.is_empty());
            let numbers = named.map(|(_, error)| [error.relative, error.rmse]);
            columns(kind, &self.variables).flatten().zip(numbers.flatten()).collect()
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
            values.extend(spectrum_columns(&self.variables).zip(spectra));
            let errors = errors_line(&self.variables, &rollout.variables);
            line.push_str(&format!("  rollout {errors}, spectrum {}", percent(rollout.spectrum())));
        }
        self.progress.epoch_end(epoch, &line);
        let values: Vec<(&str, f64)> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        self.record(epoch, &values)
    }
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
