//! Root mean square error.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// √⟨(p − t)²⟩, the mean over points and samples, in the unit of the variable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rmse {}

impl Registered for Rmse {
    const NAME: &'static str = "rmse";
    const SUMMARY: &'static str = "Root mean square error.";
}

impl Metric for Rmse {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        Ok(vec![forecast.mean_square(&forecast.error()?)?])
    }

    fn value(&self, means: &[f64]) -> f64 {
        means.first().map_or(f64::NAN, |square| square.sqrt())
    }

    fn has_unit(&self) -> bool {
        true
    }
}

crate::register_metric!(Rmse);
