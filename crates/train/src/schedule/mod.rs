//! Learning rates over the course of a run: a schedule is a file, which registers its settings.
//!
//! A schedule is a function of the step alone; it depends on no optimizer.

mod constant;
mod cosine;
mod step;
mod warmup_stable_decay;

use std::fmt;
use std::sync::Arc;

use isobar_registry::{Choice, Entry, Family, Holds, Registered};

pub use self::constant::Constant;
pub use self::cosine::Cosine;
pub use self::step::Step;
pub use self::warmup_stable_decay::WarmupStableDecay;
use crate::error::{Error, Result};

/// Learning-rate schedule that a TOML file can name: `[schedule] type = "NAME"`. Times are in epochs, and fractions are allowed.
///
/// Its name and its keys are those of [`Registered`]. [`register_schedule!`](crate::register_schedule) makes it known to every
/// program that is linked with the crate it stands in.
///
/// ```
/// use isobar_train::schedule::{LrSchedule, Moment, Schedule, ScheduleKind};
/// use isobar_train::{Registered, Result};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
///
/// /// A straight line down to nothing.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields)]
/// struct Linear {}
///
/// impl Registered for Linear {
///     const NAME: &'static str = "linear";
///     const SUMMARY: &'static str = "A straight line down to nothing.";
/// }
///
/// impl LrSchedule for Linear {
///     fn factor(&self, at: &Moment) -> f64 {
///         1.0 - at.progress(0.0, at.total)
///     }
/// }
///
/// isobar_train::register_schedule!(Linear);
///
/// let kind: ScheduleKind = serde_json::from_str(r#"{ "type": "linear" }"#)?;
/// assert_eq!(Schedule::new(kind, 1e-3, 10, 2)?.lr(10), 5e-4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait LrSchedule: fmt::Debug + Send + Sync {
    /// Returns the epochs of linear warm-up.
    fn warmup_epochs(&self) -> f64 {
        0.0
    }

    /// Checks that the other times and the factors are in their ranges; the warm-up is checked for every schedule.
    ///
    /// # Errors
    ///
    /// A setting out of its range.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the fraction of the base rate at a step after the warm-up.
    fn factor(&self, at: &Moment) -> f64;
}

/// A step of a run, as a schedule sees it.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// The step, from 0.
    pub step: f64,
    /// Steps of an epoch.
    pub steps_per_epoch: f64,
    /// Steps of the run.
    pub total: f64,
}

impl Moment {
    /// Converts epochs to steps.
    pub fn steps(&self, epochs: f64) -> f64 {
        epochs * self.steps_per_epoch
    }

    /// Returns the fraction of the way from step `start` to step `end`, in [0, 1].
    ///
    /// ```
    /// use isobar_train::schedule::Moment;
    ///
    /// // Step 25 of a run of 10 epochs of 10 steps.
    /// let at = Moment { step: 25.0, steps_per_epoch: 10.0, total: 100.0 };
    /// assert_eq!(at.progress(at.steps(2.0), at.steps(3.0)), 0.5);
    /// assert_eq!(at.progress(at.steps(5.0), at.total), 0.0);
    /// ```
    pub fn progress(&self, start: f64, end: f64) -> f64 {
        if end <= start { 0.0 } else { ((self.step - start) / (end - start)).clamp(0.0, 1.0) }
    }
}

/// Registers a type as a learning-rate schedule: see [`LrSchedule`](crate::schedule::LrSchedule).
#[macro_export]
macro_rules! register_schedule {
    ($schedule:ty) => {
        $crate::inventory::submit! { $crate::schedule::ScheduleEntry::of::<$schedule>() }
    };
}

isobar_registry::collected! {
    /// Entry of the registry of schedules.
    pub struct ScheduleEntry(Schedules);
}

/// The family of the schedules.
#[derive(Debug)]
pub struct Schedules;

impl Family for Schedules {
    const NOUN: &'static str = "schedule";
    const SUMMARY: &'static str = "Learning-rate schedule; times are in epochs, and fractions are allowed.";
    type Member = dyn LrSchedule;

    fn entries() -> Vec<Entry<Self>> {
        entries()
    }

    fn standard() -> Choice<Self> {
        Cosine { warmup_epochs: 1.0, min_factor: 0.0 }.into()
    }
}

impl<S: LrSchedule + Registered> Holds<S> for Schedules {
    fn hold(schedule: S) -> Arc<dyn LrSchedule> {
        Arc::new(schedule)
    }
}

/// The schedule of a run: any registered one. By default [`Cosine`] after one epoch of warm-up.
pub type ScheduleKind = Choice<Schedules>;

/// A schedule of known length: the learning rate of every step.
///
/// ```
/// use isobar_train::schedule::{Cosine, Schedule};
///
/// let schedule = Schedule::new(Cosine { warmup_epochs: 1.0, min_factor: 0.0 }, 1e-3, 10, 5)?;
/// assert_eq!(schedule.lr(0), 1e-4); // one tenth of the way up
/// assert_eq!(schedule.lr(10), 1e-3); // the top
/// assert!((schedule.lr(30) - 5e-4).abs() < 1e-12); // half-way down
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Schedule {
    kind: ScheduleKind,
    base: f64,
    steps_per_epoch: f64,
    total: f64,
}

impl Schedule {
    /// Makes a schedule that reaches `base` and lasts `epochs` of `steps_per_epoch` steps.
    ///
    /// # Errors
    ///
    /// A time is negative or not finite, a factor is out of its range, or `base` is not positive.
    pub fn new(kind: impl Into<ScheduleKind>, base: f64, steps_per_epoch: u64, epochs: u64) -> Result<Self> {
        let kind = kind.into();
        check_lr(base)?;
        check(&kind)?;
        let steps_per_epoch = steps_per_epoch as f64;
        Ok(Self { kind, base, steps_per_epoch, total: steps_per_epoch * epochs as f64 })
    }

    /// Returns the learning rate of step `step`, from 0.
    pub fn lr(&self, step: u64) -> f64 {
        self.base * self.factor(step)
    }

    /// Returns the fraction of the base rate at step `step`: during a warm-up of w steps (step + 1)/w, so that the first step
    /// already moves, and from step w on what the kind says.
    ///
    /// ```
    /// use isobar_train::schedule::{Constant, Schedule};
    ///
    /// // Two epochs of warm-up, of 2 steps each.
    /// let schedule = Schedule::new(Constant { warmup_epochs: 2.0 }, 1e-3, 2, 4)?;
    /// let factors: Vec<f64> = (0..5).map(|step| schedule.factor(step)).collect();
    /// assert_eq!(factors, [0.25, 0.5, 0.75, 1.0, 1.0]);
    /// # Ok::<(), isobar_train::Error>(())
    /// ```
    pub fn factor(&self, step: u64) -> f64 {
        let at = Moment { step: step as f64, steps_per_epoch: self.steps_per_epoch, total: self.total };
        let warmup = at.steps(self.kind.warmup_epochs());
        if at.step + 1.0 < warmup { (at.step + 1.0) / warmup } else { self.kind.factor(&at) }
    }
}

/// Checks a schedule's settings, the warm-up of any schedule among them.
pub(crate) fn check(kind: &ScheduleKind) -> Result<()> {
    check_epochs("warmup_epochs", kind.warmup_epochs())?;
    kind.check()
}

/// Checks the learning rate at its highest.
pub(crate) fn check_lr(lr: f64) -> Result<()> {
    match lr.is_finite() && lr > 0.0 {
        true => Ok(()),
        false => {
            let expected = "a finite number above 0; for instance --set optimizer.lr=0.001";
            Err(Error::invalid("optimizer.lr", lr, expected))
        }
    }
}

/// Checks a time of a schedule, in epochs.
fn check_epochs(key: &str, value: f64) -> Result<()> {
    match value.is_finite() && value >= 0.0 {
        true => Ok(()),
        false => {
            let expected = "a finite number of epochs, 0 or more";
            Err(Error::setting(&format!("schedule.{key}"), value, expected, "0.0"))
        }
    }
}

/// Checks a fraction of a rate.
fn check_share(key: &str, value: f64) -> Result<()> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(()),
        false => {
            let works = if value > 1.0 { "1.0" } else { "0.0" };
            Err(Error::setting(&format!("schedule.{key}"), value, "a share from 0 to 1", works))
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn lrs(kind: impl Into<ScheduleKind>) -> Vec<f64> {
        let schedule = Schedule::new(kind, 1.0, 2, 4).unwrap();
        (0..9).map(|step| (schedule.lr(step) * 1e4).round() / 1e4).collect()
    }

    #[rstest]
    #[case::constant(Constant { warmup_epochs: 0.0 }, [1.0; 9])]
    #[case::constant_warm(Constant { warmup_epochs: 2.0 },
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])]
    // torch.optim.lr_scheduler.CosineAnnealingLR(T_max=8)
    #[case::cosine(Cosine { warmup_epochs: 0.0, min_factor: 0.0 },
        [1.0, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381, 0.0])]
    #[case::cosine_floor(Cosine { warmup_epochs: 2.0, min_factor: 0.2 },
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.8828, 0.6, 0.3172, 0.2])]
    #[case::step(Step { warmup_epochs: 0.0, every_epochs: 1.5, gamma: 0.1 },
        [1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])]
    #[case::stable(WarmupStableDecay { warmup_epochs: 1.0, decay_epochs: 2.0, min_factor: 0.0 },
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])]
    fn follows_its_definition(#[case] kind: impl Into<ScheduleKind>, #[case] expected: [f64; 9]) {
        assert_eq!(lrs(kind), expected);
    }

    #[rstest]
    #[case(Cosine { warmup_epochs: -1.0, min_factor: 0.0 }, "schedule.warmup_epochs is -1")]
    #[case(Cosine { warmup_epochs: 0.0, min_factor: 2.0 }, "schedule.min_factor is 2")]
    #[case(Step { warmup_epochs: 0.0, every_epochs: 0.0, gamma: 0.5 }, "schedule.every_epochs is 0")]
    fn refuses_what_is_out_of_range(#[case] kind: impl Into<ScheduleKind>, #[case] text: &str) {
        let error = Schedule::new(kind, 1.0, 1, 1).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
}
