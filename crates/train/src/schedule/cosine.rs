//! Half a cosine wave.

use std::f64::consts::PI;

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{LrSchedule, Moment, check_share};
use crate::error::Result;

/// Half a cosine wave from the full rate down to `min_factor` of it (Loshchilov and Hutter, "SGDR", 2017).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cosine {
    /// Epochs of linear warm-up before it.
    #[serde(default)]
    pub warmup_epochs: f64,
    /// Final rate, as a fraction of the peak rate.
    #[serde(default)]
    pub min_factor: f64,
}

impl Registered for Cosine {
    const NAME: &'static str = "cosine";
    const SUMMARY: &'static str = "Half a cosine wave from the full rate down to `min_factor` of it (Loshchilov and Hutter, \"SGDR\", 2017).";
}

impl LrSchedule for Cosine {
    fn warmup_epochs(&self) -> f64 {
        self.warmup_epochs
    }

    fn check(&self) -> Result<()> {
        check_share("min_factor", self.min_factor)
    }

    fn factor(&self, at: &Moment) -> f64 {
        let progress = at.progress(at.steps(self.warmup_epochs), at.total);
        self.min_factor + (1.0 - self.min_factor) * 0.5 * (1.0 + (PI * progress).cos())
    }
}

crate::register_schedule!(Cosine);
