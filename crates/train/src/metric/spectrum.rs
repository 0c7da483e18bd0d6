//! Error of the energy spectrum.

use isobar_array::{Reduction, Unary, periodic};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// Mean over samples of Σₖ |Eₖ(p) − Eₖ(t)| / Σₖ Eₖ(t), where Eₖ is the energy of a field in the shell of wave number k
/// ([`periodic::energy_spectrum`]). Fields are taken as periodic, and points are not weighted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spectrum {}

impl Registered for Spectrum {
    const NAME: &'static str = "spectrum";
    const SUMMARY: &'static str = "Error of the energy spectrum.";
}

impl Metric for Spectrum {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let dims = forecast.spatial();
        let (of_prediction, of_target) = (
            periodic::energy_spectrum(forecast.prediction(), &dims)?,
            periodic::energy_spectrum(forecast.target(), &dims)?,
        );
        let sum = |x: &A| x.reduce(Reduction::Sum, &[-1], false);
        let difference = sum(&of_prediction.sub(&of_target)?.unary(Unary::Abs)?)?;
        Ok(vec![difference.div(&sum(&of_target)?)?])
    }
}

crate::register_metric!(Spectrum);
