//! Anomaly correlation coefficient against a climatology.

use isobar_array::Unary;
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// Mean over samples of ⟨p′ t′⟩ / √(⟨p′²⟩ ⟨t′²⟩), where p′ = p − c and t′ = t − c are anomalies from the climatology c at each point (Rasp
/// et al., "WeatherBench 2", 2024): 1 for a perfect forecast, 0 for a sample without an anomaly. Points without a climatology, where it
/// is NaN, do not count. The best checkpoint has the highest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Acc {}

impl Registered for Acc {
    const NAME: &'static str = "acc";
    const SUMMARY: &'static str = "Anomaly correlation coefficient against a climatology.";
}

impl Metric for Acc {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let forecast = &forecast.over_climatology()?;
        let climatology = forecast.climatology()?;
        let prediction = forecast.prediction().sub(climatology)?;
        let target = forecast.target().sub(climatology)?;
        let product = forecast.mean(&prediction.mul(&target)?)?;
        let norms = forecast.mean_square(&prediction)?.mul(&forecast.mean_square(&target)?)?;
        // Zero over zero is no correlation.
        let norms =
            norms.unary(Unary::Sqrt)?.unary(Unary::Clamp { min: f64::MIN_POSITIVE, max: f64::INFINITY })?;
        Ok(vec![product.div(&norms)?])
    }

    fn points<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<A> {
        forecast.over_climatology()?.points()
    }

    fn cost(&self, value: f64) -> f64 {
        1.0 - value
    }

    fn needs_climatology(&self) -> bool {
        true
    }
}

crate::register_metric!(Acc);
