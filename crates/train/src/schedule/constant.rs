//! A constant rate.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{LrSchedule, Moment};

/// Constant rate after the warm-up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    /// Epochs of linear warm-up.
    #[serde(default)]
    pub warmup_epochs: f64,
}

impl Registered for Constant {
    const NAME: &'static str = "constant";
    const SUMMARY: &'static str = "Constant rate after the warm-up.";
}

impl LrSchedule for Constant {
    fn warmup_epochs(&self) -> f64 {
        self.warmup_epochs
    }

    fn factor(&self, _: &Moment) -> f64 {
        1.0
    }
}

crate::register_schedule!(Constant);
