//! Spread of an ensemble over the error of its mean.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::spread::variance;
use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// √((M + 1) / M · ⟨s²⟩ / ⟨(p − t)²⟩), where s² is the variance over the M members of an ensemble and p their mean, and means are over
/// points and samples (Fortin et al., "Why should ensemble spread match the RMSE of the ensemble mean?", 2014): 1 for a reliable
/// ensemble, less for one with too little spread. The best checkpoint is nearest 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpreadSkill {}

impl Registered for SpreadSkill {
    const NAME: &'static str = "spread_skill";
    const SUMMARY: &'static str = "Spread of an ensemble over the error of its mean.";
}

impl Metric for SpreadSkill {
    fn count(&self) -> usize {
        2
    }

    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let members = match forecast.members() {
            Some(members) => members.extent(1)?.max(1) as f64,
            None => 1.0,
        };
        let spread = variance(forecast)?.mul_scalar((members + 1.0) / members)?;
        Ok(vec![spread, forecast.mean_square(&forecast.error()?)?])
    }

    fn value(&self, means: &[f64]) -> f64 {
        match means {
            [spread, error, ..] => (spread / error).sqrt(),
            _ => f64::NAN,
        }
    }

    fn cost(&self, value: f64) -> f64 {
        (value - 1.0).abs()
    }
}

crate::register_metric!(SpreadSkill);
