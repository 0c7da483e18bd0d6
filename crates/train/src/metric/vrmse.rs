//! Root mean square error over the spatial deviation of the truth.

use isobar_array::Unary;
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::nrmse::EPSILON;
use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// Mean over samples of √(⟨(p − t)²⟩ / (σ² + ε)) with ε = 10⁻⁷, where σ² is the variance of the truth over points, with n − 1 in the
/// denominator: The Well's VRMSE (Ohana et al., "The Well", 2024). Predicting the spatial mean gives about 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Vrmse {}

impl Registered for Vrmse {
    const NAME: &'static str = "vrmse";
    const SUMMARY: &'static str = "Root mean square error over the spatial deviation of the truth.";
}

impl Metric for Vrmse {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let error = forecast.mean_square(&forecast.error()?)?;
        let (target, points) = (forecast.target(), forecast.points()?);
        let mean = forecast.mean(target)?;
        let shape = [mean.shape(), vec![1; forecast.spatial().len()]].concat();
        let variance = forecast.mean_square(&forecast.fill(&target.sub(&mean.reshape(&shape)?)?)?)?;
        // n / (n − 1); a single point has no deviation.
        let others = points.add_scalar(-1.0)?.unary(Unary::Clamp { min: 1.0, max: f64::INFINITY })?;
        let scale = variance.mul(&points)?.div(&others)?.add_scalar(EPSILON)?;
        Ok(vec![error.div(&scale)?.unary(Unary::Sqrt)?])
    }
}

crate::register_metric!(Vrmse);
