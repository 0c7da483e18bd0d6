//! Root mean square error over the root mean square of the truth.

use isobar_array::Unary;
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// Mean over samples of √(⟨(p − t)²⟩ / (⟨t²⟩ + ε)) with ε = 10⁻⁷: The Well's NRMSE (Ohana et al., "The Well", 2024).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Nrmse {}

impl Registered for Nrmse {
    const NAME: &'static str = "nrmse";
    const SUMMARY: &'static str = "Root mean square error over the root mean square of the truth.";
}

impl Metric for Nrmse {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let error = forecast.mean_square(&forecast.error()?)?;
        let scale = forecast.mean_square(forecast.target())?.add_scalar(EPSILON)?;
        Ok(vec![error.div(&scale)?.unary(Unary::Sqrt)?])
    }
}

crate::register_metric!(Nrmse);

/// Least scale of squares, so that a truth of zero has a finite error.
pub(super) const EPSILON: f64 = 1e-7;
