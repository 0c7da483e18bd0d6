//! Spread of an ensemble.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;
use crate::loss::ensemble_variance;

/// √⟨s²⟩, where s² is the variance over the members of an ensemble, with M − 1 in the denominator, and the mean is over points and
/// samples (Fortin et al., "Why should ensemble spread match the RMSE of the ensemble mean?", 2014), in the unit of the variable; 0
/// of a single forecast.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spread {}

impl Registered for Spread {
    const NAME: &'static str = "spread";
    const SUMMARY: &'static str = "Spread of an ensemble.";
}

impl Metric for Spread {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        Ok(vec![variance(forecast)?])
    }

    fn value(&self, means: &[f64]) -> f64 {
        means.first().map_or(f64::NAN, |square| square.sqrt())
    }

    fn has_unit(&self) -> bool {
        true
    }
}

crate::register_metric!(Spread);

/// Variance over members, the means over points, `[sample, channel]`.
pub(super) fn variance<A: MetricArray>(forecast: &Forecast<A>) -> Result<A> {
    match forecast.members() {
        Some(members) => forecast.mean(&forecast.fill(&ensemble_variance(members)?)?),
        None => forecast.mean(&forecast.target().mul_scalar(0.0)?),
    }
}
