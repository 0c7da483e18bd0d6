//! A stable part and a decay.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{LrSchedule, Moment, check_epochs, check_share};
use crate::error::Result;

/// Warm-up, a stable part, and a linear decay at the end (Hägele et al., "Scaling laws and compute-optimal training beyond fixed
/// training durations", 2024).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarmupStableDecay {
    /// Epochs of linear warm-up.
    #[serde(default)]
    pub warmup_epochs: f64,
    /// Epochs of decay at the end.
    pub decay_epochs: f64,
    /// Final rate, as a fraction of the peak rate.
    #[serde(default)]
    pub min_factor: f64,
}

impl Registered for WarmupStableDecay {
    const NAME: &'static str = "warmup_stable_decay";
    const SUMMARY: &'static str = "Warm-up, a stable part, and a linear decay at the end (Hägele et al., \"Scaling laws and compute-optimal training beyond fixed training durations\", 2024).";
}

impl LrSchedule for WarmupStableDecay {
    fn warmup_epochs(&self) -> f64 {
        self.warmup_epochs
    }

    fn check(&self) -> Result<()> {
        check_epochs("decay_epochs", self.decay_epochs)?;
        check_share("min_factor", self.min_factor)
    }

    fn factor(&self, at: &Moment) -> f64 {
        let start = (at.total - at.steps(self.decay_epochs)).max(at.steps(self.warmup_epochs));
        1.0 - (1.0 - self.min_factor) * at.progress(start, at.total)
    }
}

crate::register_schedule!(WarmupStableDecay);
