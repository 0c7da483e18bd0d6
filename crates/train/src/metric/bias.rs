//! Mean error.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// ⟨p − t⟩, the mean over points and samples, in the unit of the variable. The best checkpoint has the least magnitude.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bias {}

impl Registered for Bias {
    const NAME: &'static str = "bias";
    const SUMMARY: &'static str = "Mean error.";
}

impl Metric for Bias {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        Ok(vec![forecast.mean(&forecast.error()?)?])
    }

    fn cost(&self, value: f64) -> f64 {
        value.abs()
    }

    fn has_unit(&self) -> bool {
        true
    }
}

crate::register_metric!(Bias);
