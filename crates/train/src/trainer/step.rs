//! One step of training.

use std::time::Instant;

use isobar_collectives::flight::Phase;

use super::Run;
use super::passes::{OwnLoss, Passes, own_passes};
use crate::clip::unscale_and_clip;
use crate::config::{Precision, TrainConfig};
use crate::error::{Context, Error, Result};
use crate::optim::Optimizer;
use crate::replicas::check_replicas;
use crate::task::{Coming, Task};
use crate::triggers::Requests;

/// Settings that may be the cause of a loss that is not finite.
fn advice(step: u64, lr: f64, train: &TrainConfig) -> String {
    let mut found = Vec::new();
    // Before the first update, the learning rate has no effect.
    if step > 0 {
        found.push(format!("lower the learning rate (--set optimizer.lr={:e})", lr / 10.0));
        if train.clip_norm.is_none() {
            found.push("limit the norm of gradients (--set train.clip_norm=1.0)".to_owned());
        }
    }
    if !matches!(train.precision, Precision::Float32 | Precision::Float64) {
        found.push("use more bits (--set train.precision=float32)".to_owned());
    }
    found.push(match step {
        0 => {
            "check the data, the initial weights and the settings of [model] and [task], such as noise levels"
                .to_owned()
        }
        _ => "check the data for such values".to_owned(),
    });
    match found.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{}, or {last}", others.join(", ")),
        None => String::new(),
    }
}

impl<T: Task> Run<'_, T> {
    /// A step, and what all ranks together are asked for.
    pub(super) fn step(&mut self, epoch: u64, batch: &[usize]) -> Result<Requests> {
        let (began, waited) = (Instant::now(), self.ranks.world.flight().waited());
        let factor = self.state.loss_scale.map_or(1.0, |scale| scale.factor());
        let passes = self.passes(epoch, batch, factor)?;
        self.mark(Phase::Optimizer);
        let busy = began.elapsed().saturating_sub(self.ranks.world.flight().waited() - waited);
        let (loss, asked) = self.global_mean(&passes, batch.len(), busy.as_secs_f64())?;
        let loss = match loss.is_finite() {
            true => loss,
            false => {
                let step = self.state.step;
                let advice = advice(step, self.schedule.lr(step), &self.config.train);
                let error = Error::NonFiniteLoss { value: loss, step, advice };
                return Err(self.explained(error, epoch, batch));
            }
        };
        let lr = self.schedule.lr(self.state.step);
        let norm = match unscale_and_clip(&self.params, factor, self.config.train.clip_norm) {
            Ok(norm) => {
                self.optimizer.set_run_step(self.state.step);
                self.optimizer.step(lr)?;
                if let Some(scale) = &mut self.state.loss_scale {
                    scale.stepped();
                }
                norm
            }
            Err(Error::NonFiniteGradient { .. }) if self.state.loss_scale.is_some() => {
                self.overflowed()?;
                f64::INFINITY
            }
            Err(error @ Error::NonFiniteGradient { .. }) => return Err(self.explained(error, epoch, batch)),
            Err(error) => return Err(error),
        };
        self.checkpoints.poll();
        self.state.validation_error = None;
        self.state.step += 1;
        self.state.batch += 1;
        self.state.loss_sum += loss * batch.len() as f64;
        self.state.loss_samples += batch.len() as u64;
        self.summary.losses.push(loss);
        self.progress.step(epoch, loss, lr, batch.len() as u64);
        let every = self.config.train.check_replicas_every;
        if every > 0 && self.state.step.is_multiple_of(every) {
            check_replicas(&self.params, &self.ranks.world)?;
        }
        let every = self.config.metrics.every_steps;
        if every > 0 && self.state.step.is_multiple_of(every) {
            let rate = self.progress.rate();
            let values = [("loss", loss), ("lr", lr), ("grad_norm", norm), ("samples_per_second", rate)];
            self.record(epoch, &values)?;
        }
        Ok(asked)
    }

    /// Leaves out a step whose gradients are too large for 16 bits.
    fn overflowed(&mut self) -> Result<()> {
        let step = self.state.step;
        let Some(scale) = &mut self.state.loss_scale else { return Ok(()) };
        scale.overflowed(step)?;
        tracing::info!(
            step,
            "gradients overflow: the step is left out, the loss scale is {} now",
            scale.factor()
        );
        Ok(())
    }

    /// Announces the remaining batches of the epoch, its validation, and the batches of the next epoch up to the end of the run, so that
    /// the next epoch does not wait for its first samples.
    pub(super) fn announce(&self, epoch: u64, batches: &[Vec<usize>]) {
        let left =
            self.config.train.max_steps.map_or(u64::MAX, |limit| limit.saturating_sub(self.state.step));
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        self.announce_batches(Coming::Train(epoch), batches.iter().take(left));
        if left < batches.len() {
            return;
        }
        if self.validates(epoch) || left == batches.len() {
            self.announce_validation();
        }
        if left > batches.len() && epoch + 1 < self.config.train.epochs {
            let next = self.sampler.epoch(epoch + 1);
            self.announce_batches(Coming::NextEpoch(epoch + 1), next.iter().take(left - batches.len()));
        }
    }

    fn announce_batches<'b>(&self, coming: Coming, batches: impl Iterator<Item = &'b Vec<usize>>) {
        let data = &self.ranks.data;
        let passes = batches.flat_map(|batch| own_passes(batch, data, self.config.train.accumulate));
        let passes: Vec<&[usize]> =
            passes.map(|(samples, _)| samples).filter(|samples| !samples.is_empty()).collect();
        self.task.announce(coming, &passes);
    }

    /// The passes over a batch. Gradients are those of the loss times `factor`.
    fn passes(&self, epoch: u64, batch: &[usize], factor: f64) -> Result<Vec<OwnLoss>> {
        let passes = Passes {
            task: self.task,
            ranks: self.ranks,
            train: &self.config.train,
            parallel: &self.parallel,
            seed: self.state.seed,
            step: self.state.step,
        };
        passes.run((epoch, batch), factor, || self.precision(), |phase| self.mark(phase))
    }

    /// The loss over the global batch, the same on every rank; and what any rank is asked for.
    fn global_mean(&mut self, passes: &[OwnLoss], global: usize, busy: f64) -> Result<(f64, Requests)> {
        let mut own = 0.0;
        for (loss, samples) in passes {
            own += loss.f_double_value(&[]).context(|| "reading the loss".to_owned())? * *samples as f64;
        }
        let joined = self.triggers.join(&self.ranks.world, &self.ranks.data, own, busy)?;
        if let Some(straggler) = self.stragglers.add(&joined.busy) {
            if self.ranks.world.rank() == 0 {
                tracing::warn!(step = self.state.step, "{straggler}");
            }
            self.summary.straggler = Some(straggler);
        }
        // One rank's loss that is not finite is every rank's affair.
        let sum = if joined.finite { joined.sum } else { f64::NAN };
        Ok((sum / global as f64, joined.asked))
    }

    /// Takes the passes of a step that gave values that are not finite once more, to say which rank's operator made them.
    fn explained(&self, error: Error, epoch: u64, batch: &[usize]) -> Error {
        let step = self.state.step;
        let world = &self.ranks.world;
        let again = || self.passes(epoch, batch, 1.0).map(drop);
        match crate::anomaly::origin(&self.whole, world, again) {
            Some(origin) => Error::NonFinite { step, what: Box::new(error), origin },
            None => error,
        }
    }
}
