//! Validation, and what is said after an epoch.

use isobar_collectives::Group;
use isobar_collectives::flight::Phase;

use super::Run;
use crate::error::{Error, Result};
use crate::task::{BoxError, RolloutError, Task, share};

impl<T: Task> Run<'_, T> {
    /// Both errors, of the averaged parameters where they are averaged.
    pub(super) fn validated(&mut self) -> Result<(Option<f64>, Option<RolloutError>)> {
        self.swap_averages()?;
        let errors = (self.validate()?, self.validate_rollouts()?);
        self.swap_averages()?;
        Ok(errors)
    }

    /// Exchanges parameters and their averages.
    pub(super) fn swap_averages(&mut self) -> Result<()> {
        if !self.optimizer.averages() {
            return Ok(());
        }
        self.optimizer.swap()?;
        self.parallel.changed()
    }

    /// The mean of the validation samples' errors, over all ranks.
    fn validate(&self) -> Result<Option<f64>> {
        let [error] = self.means(self.task.validation_samples(), |samples| {
            Ok(self.task.errors(samples)?.into_iter().map(|error| [error]).collect())
        })?;
        Ok(error)
    }

    /// The mean of the rollouts' errors, over all ranks.
    fn validate_rollouts(&self) -> Result<Option<RolloutError>> {
        let [error, spectrum] = self.means(self.task.rollouts(), |rollouts| {
            let errors = self.task.rollout_errors(rollouts)?;
            Ok(errors.into_iter().map(|of| [of.error, of.spectrum]).collect())
        })?;
        Ok(error.zip(spectrum).map(|(error, spectrum)| RolloutError { error, spectrum }))
    }

    /// The means of so many samples' numbers, over all ranks; nothing of no samples.
    fn means<const N: usize>(
        &self,
        count: usize,
        numbers: impl Fn(&[usize]) -> Result<Vec<[f64; N]>, BoxError>,
    ) -> Result<[Option<f64>; N]> {
        if count == 0 {
            return Ok([None; N]);
        }
        self.mark(Phase::Validation);
        let data = &self.ranks.data;
        let own: Vec<usize> = share(count, data.rank(), data.size()).collect();
        let at_once = self.config.train.batch_size.div_ceil(data.size()).max(1);
        let mut sums = [0.0; N];
        let _no_grad = tch::no_grad_guard();
        let _precision = self.precision()?;
        for samples in own.chunks(at_once) {
            let all = numbers(samples).map_err(|source| Error::Task { context: "validation", source })?;
            for sample in all {
                sums.iter_mut().zip(sample).for_each(|(sum, number)| *sum += number);
            }
        }
        let mut means = [None; N];
        for (mean, sum) in means.iter_mut().zip(sums) {
            *mean = Some(sum_over(data, sum)? / count as f64);
        }
        Ok(means)
    }

    pub(super) fn report(
        &mut self,
        epoch: u64,
        loss: f64,
        error: Option<f64>,
        rollout: Option<RolloutError>,
    ) -> Result<()> {
        let mut values = vec![("epoch_loss", loss)];
        let mut line = format!("loss {loss:.4e}");
        if let Some(error) = error {
            self.summary.validation_error = Some(error);
            values.push(("validation_error", error));
            line.push_str(&format!("  validation error {:.2} %", error * 100.0));
        }
        if let Some(RolloutError { error, spectrum }) = rollout {
            self.summary.rollout_error = rollout;
            values.extend([("rollout_error", error), ("spectrum_error", spectrum)]);
            line.push_str(&format!("  rollout {:.2} %, spectrum {:.2} %", error * 100.0, spectrum * 100.0));
        }
        self.progress.epoch_end(epoch, &line);
        self.record(epoch, &values)
    }
}

/// A sum in rank order: the same to the last bit on every rank.
fn sum_over(group: &Group, value: f64) -> Result<f64> {
    if group.size() == 1 {
        return Ok(value);
    }
    let all = group.all_gather_bytes(&value.to_le_bytes())?;
    Ok(all.iter().filter_map(|bytes| Some(f64::from_le_bytes(bytes[..].try_into().ok()?))).sum())
}
