//! Reductions at regular intervals.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{LrSchedule, Moment, check_share};
use crate::error::{Error, Result};

/// Multiplied by `gamma` every `every_epochs`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Epochs of linear warm-up, counted within the first steps.
    #[serde(default)]
    pub warmup_epochs: f64,
    /// Epochs between two reductions.
    pub every_epochs: f64,
    /// The factor of each reduction.
    pub gamma: f64,
}

impl Registered for Step {
    const NAME: &'static str = "step";
    const SUMMARY: &'static str = "Multiplied by `gamma` every `every_epochs`.";
}

impl LrSchedule for Step {
    fn warmup_epochs(&self) -> f64 {
        self.warmup_epochs
    }

    fn check(&self) -> Result<()> {
        if !self.every_epochs.is_finite() || self.every_epochs <= 0.0 {
            let expected = "a finite number of epochs above 0";
            return Err(Error::setting("schedule.every_epochs", self.every_epochs, expected, "10.0"));
        }
        check_share("gamma", self.gamma)
    }

    fn factor(&self, at: &Moment) -> f64 {
        self.gamma.powf((at.step / at.steps(self.every_epochs)).floor())
    }
}

crate::register_schedule!(Step);
