//! Mean absolute error.

use isobar_array::Unary;
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// ⟨|p − t|⟩, the mean over points and samples, in the unit of the variable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MaeScore {}

impl Registered for MaeScore {
    const NAME: &'static str = "mae";
    const SUMMARY: &'static str = "Mean absolute error.";
}

impl Metric for MaeScore {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        Ok(vec![forecast.mean(&forecast.error()?.unary(Unary::Abs)?)?])
    }

    fn has_unit(&self) -> bool {
        true
    }
}

crate::register_metric!(MaeScore);
