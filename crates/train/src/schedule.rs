//! Learning rates over the course of a run.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Learning-rate schedule; times are in epochs, and fractions are allowed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ScheduleKind {
    /// Constant rate after the warm-up.
    Constant {
        /// Epochs of linear warm-up.
        #[serde(default)]
        warmup_epochs: f64,
    },
    /// Half a cosine wave from the full rate down to `min_factor` of it (Loshchilov and Hutter, "SGDR", 2017).
    Cosine {
        /// Epochs of linear warm-up before it.
        #[serde(default)]
        warmup_epochs: f64,
        /// Final rate, as a fraction of the peak rate.
        #[serde(default)]
        min_factor: f64,
    },
    /// Multiplied by `gamma` every `every_epochs`.
    Step {
        /// Epochs of linear warm-up, counted within the first steps.
        #[serde(default)]
        warmup_epochs: f64,
        /// Epochs between two reductions.
        every_epochs: f64,
        /// The factor of each reduction.
        gamma: f64,
    },
    /// Warm-up, a stable part, and a linear decay at the end (Hägele et al., "Scaling laws and compute-optimal training
    /// beyond fixed training durations", 2024).
    WarmupStableDecay {
        /// Epochs of linear warm-up.
        #[serde(default)]
        warmup_epochs: f64,
        /// Epochs of decay at the end.
        decay_epochs: f64,
        /// Final rate, as a fraction of the peak rate.
        #[serde(default)]
        min_factor: f64,
    },
}

impl Default for ScheduleKind {
    fn default() -> Self {
        Self::Cosine { warmup_epochs: 1.0, min_factor: 0.0 }
    }
}

/// A schedule of known length: the learning rate of every step.
///
/// ```
/// use isobar_train::schedule::{Schedule, ScheduleKind};
///
/// let kind = ScheduleKind::Cosine { warmup_epochs: 1.0, min_factor: 0.0 };
/// let schedule = Schedule::new(kind, 1e-3, 10, 5)?;
/// assert_eq!(schedule.lr(0), 1e-4); // one tenth of the way up
/// assert_eq!(schedule.lr(10), 1e-3); // the top
/// assert!((schedule.lr(30) - 5e-4).abs() < 1e-12); // half-way down
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Schedule {
    kind: ScheduleKind,
    base: f64,
    steps_per_epoch: u64,
    total: f64,
}

impl Schedule {
    /// A schedule that reaches `base` and lasts `epochs` of `steps_per_epoch` steps.
    ///
    /// # Errors
    ///
    /// A time is negative or not finite, a factor is out of its range, or `base` is not positive.
    pub fn new(kind: ScheduleKind, base: f64, steps_per_epoch: u64, epochs: u64) -> Result<Self> {
        check_lr(base)?;
        kind.check()?;
        Ok(Self { kind, base, steps_per_epoch, total: steps_per_epoch as f64 * epochs as f64 })
    }

    /// The learning rate of step `step`, from 0.
    pub fn lr(&self, step: u64) -> f64 {
        self.base * self.factor(step)
    }

    /// The share of the base rate at step `step`: during a warm-up of w steps (step + 1)/w, so that the first step
    /// already moves, and from step w on what the kind says.
    pub fn factor(&self, step: u64) -> f64 {
        let steps = |epochs: f64| epochs * self.steps_per_epoch as f64;
        let at = step as f64;
        let warmup = steps(self.kind.warmup_epochs());
        if at + 1.0 < warmup {
            return (at + 1.0) / warmup;
        }
        match self.kind {
            ScheduleKind::Constant { .. } => 1.0,
            ScheduleKind::Cosine { min_factor, .. } => {
                let progress = progress(at, warmup, self.total);
                min_factor + (1.0 - min_factor) * 0.5 * (1.0 + (PI * progress).cos())
            }
            ScheduleKind::Step { every_epochs, gamma, .. } => gamma.powf((at / steps(every_epochs)).floor()),
            ScheduleKind::WarmupStableDecay { decay_epochs, min_factor, .. } => {
                let start = (self.total - steps(decay_epochs)).max(warmup);
                1.0 - (1.0 - min_factor) * progress(at, start, self.total)
            }
        }
    }
}

impl ScheduleKind {
    /// Checks that times and factors are in their ranges.
    pub(crate) fn check(&self) -> Result<()> {
        check(self)
    }

    /// Epochs of linear warm-up.
    pub(crate) fn warmup_epochs(&self) -> f64 {
        match *self {
            Self::Constant { warmup_epochs }
            | Self::Cosine { warmup_epochs, .. }
            | Self::Step { warmup_epochs, .. }
            | Self::WarmupStableDecay { warmup_epochs, .. } => warmup_epochs,
        }
    }
}

/// Checks the learning rate at its highest.
pub(crate) fn check_lr(lr: f64) -> Result<()> {
    match lr.is_finite() && lr > 0.0 {
        true => Ok(()),
        false => {
            let usual = if lr.is_finite() && lr < 0.0 { -lr } else { 1e-3 };
            let expected = format!("a finite number above 0; for instance --set optimizer.lr={usual}");
            Err(Error::invalid("optimizer.lr", lr, expected))
        }
    }
}

/// Returns the fraction of the way from `start` to `end` at `at`, in [0, 1].
fn progress(at: f64, start: f64, end: f64) -> f64 {
    if end <= start { 0.0 } else { ((at - start) / (end - start)).clamp(0.0, 1.0) }
}

fn check(kind: &ScheduleKind) -> Result<()> {
    let time = |name: &str, value: f64, positive: bool| {
        if value.is_finite() && value >= 0.0 && (value > 0.0 || !positive) {
            return Ok(());
        }
        let (expected, works) = match positive {
            true => ("a finite number of epochs above 0", "10.0"),
            false => ("a finite number of epochs, 0 or more", "0.0"),
        };
        Err(Error::setting(&format!("schedule.{name}"), value, expected, works))
    };
    let share = |name: &str, value: f64| match (0.0..=1.0).contains(&value) {
        true => Ok(()),
        false => {
            let works = if value > 1.0 { "1.0" } else { "0.0" };
            Err(Error::setting(&format!("schedule.{name}"), value, "a share from 0 to 1", works))
        }
    };
    time("warmup_epochs", kind.warmup_epochs(), false)?;
    match *kind {
        ScheduleKind::Constant { .. } => Ok(()),
        ScheduleKind::Cosine { min_factor, .. } => share("min_factor", min_factor),
        ScheduleKind::Step { every_epochs, gamma, .. } => {
            time("every_epochs", every_epochs, true)?;
            share("gamma", gamma)
        }
        ScheduleKind::WarmupStableDecay { decay_epochs, min_factor, .. } => {
            time("decay_epochs", decay_epochs, false)?;
            share("min_factor", min_factor)
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn lrs(kind: ScheduleKind) -> Vec<f64> {
        let schedule = Schedule::new(kind, 1.0, 2, 4).unwrap();
        (0..9).map(|step| (schedule.lr(step) * 1e4).round() / 1e4).collect()
    }

    #[rstest]
    #[case::constant(ScheduleKind::Constant { warmup_epochs: 0.0 }, [1.0; 9])]
    #[case::constant_warm(ScheduleKind::Constant { warmup_epochs: 2.0 },
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])]
    // torch.optim.lr_scheduler.CosineAnnealingLR(T_max=8)
    #[case::cosine(ScheduleKind::Cosine { warmup_epochs: 0.0, min_factor: 0.0 },
        [1.0, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381, 0.0])]
    #[case::cosine_floor(ScheduleKind::Cosine { warmup_epochs: 2.0, min_factor: 0.2 },
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.8828, 0.6, 0.3172, 0.2])]
    #[case::step(ScheduleKind::Step { warmup_epochs: 0.0, every_epochs: 1.5, gamma: 0.1 },
        [1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])]
    #[case::stable(ScheduleKind::WarmupStableDecay { warmup_epochs: 1.0, decay_epochs: 2.0, min_factor: 0.0 },
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])]
    fn follows_its_definition(#[case] kind: ScheduleKind, #[case] expected: [f64; 9]) {
        assert_eq!(lrs(kind), expected);
    }

    #[rstest]
    #[case(ScheduleKind::Cosine { warmup_epochs: -1.0, min_factor: 0.0 }, "schedule.warmup_epochs is -1")]
    #[case(ScheduleKind::Cosine { warmup_epochs: 0.0, min_factor: 2.0 }, "schedule.min_factor is 2")]
    #[case(ScheduleKind::Step { warmup_epochs: 0.0, every_epochs: 0.0, gamma: 0.5 }, "schedule.every_epochs is 0")]
    fn refuses_what_is_out_of_range(#[case] kind: ScheduleKind, #[case] text: &str) {
        let error = Schedule::new(kind, 1.0, 1, 1).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
}
