//! Continuous ranked probability score.

use isobar_array::Unary;
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;
use crate::loss::crps;

/// Mean over points and samples of the fair continuous ranked probability score of an ensemble ([`loss::crps`](crate::loss::crps)),
/// in the unit of the variable; of a single forecast the mean absolute error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CrpsScore {}

impl Registered for CrpsScore {
    const NAME: &'static str = "crps";
    const SUMMARY: &'static str = "Continuous ranked probability score.";
}

impl Metric for CrpsScore {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let target = forecast.target();
        let errors = match forecast.members() {
            Some(members) => crps(members, target, true)?,
            None => forecast.error()?.unary(Unary::Abs)?,
        };
        Ok(vec![forecast.mean(&forecast.fill(&errors)?)?])
    }

    fn has_unit(&self) -> bool {
        true
    }
}

crate::register_metric!(CrpsScore);
