//! Error of the energy spectrum.

use isobar_array::{Comparison, Reduction, Unary};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Forecast, Metric, MetricArray};
use crate::error::Result;

/// Mean over samples of Σₖ |Eₖ(p) − Eₖ(t)| / Σₖ Eₖ(t), where Eₖ is the energy of a field in the shell of wave number k
/// ([`Forecast::energy_spectra`]). A truth without energy counts 1, or 0 if it is predicted exactly. Fields are taken as
/// periodic, and points are not weighted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spectrum {}

impl Registered for Spectrum {
    const NAME: &'static str = "spectrum";
    const SUMMARY: &'static str = "Error of the energy spectrum.";
}

impl Metric for Spectrum {
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
        let [of_prediction, of_target] = forecast.energy_spectra()?;
        let sum = |x: &A| x.reduce(Reduction::Sum, &[-1], false);
        let difference = sum(&of_prediction.sub(of_target)?.unary(Unary::Abs)?)?;
        let energy = sum(of_target)?;
        let nothing = |x: &A| x.compare(Comparison::Eq, &x.mul_scalar(0.0)?);
        // Without energy in the truth, the difference is the energy of the prediction.
        let scale = nothing(&energy)?.select_where(&difference, &energy)?;
        let scale = scale.masked_fill(&nothing(&difference)?, 1.0)?;
        Ok(vec![difference.div(&scale)?])
    }
}

crate::register_metric!(Spectrum);
