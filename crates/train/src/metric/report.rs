//! Metrics that a run reports, with what they need besides a forecast.

use isobar_array::Array;
use tch::Tensor;

use super::{Forecast, MetricKind};
use crate::error::{Context, Error, Result};
use crate::loss::Weighting;

/// Metrics of a run, and the climatology that some of them need. The default reports none.
#[derive(Debug, Default)]
pub struct Report {
    metrics: Vec<MetricKind>,
    /// This rank's window, `[channel, spatial…]`.
    climatology: Option<Tensor>,
}

impl Report {
    /// Makes a report of `metrics`. If one needs a climatology, `climatology` makes this rank's window of it, `[channel, spatial…]`,
    /// on physical values: such as the mean over the training samples at each point.
    ///
    /// # Errors
    ///
    /// Those of `climatology`.
    pub fn new<E>(
        metrics: &[MetricKind],
        climatology: impl FnOnce() -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        let needed = metrics.iter().any(|metric| metric.needs_climatology());
        let climatology = needed.then(climatology).transpose()?;
        Ok(Self { metrics: metrics.to_vec(), climatology })
    }

    /// Returns the metrics.
    pub fn metrics(&self) -> &[MetricKind] {
        &self.metrics
    }

    /// Makes the forecast that metrics are computed of: `prediction` on physical values, and the truth, of which `local` is this
    /// rank's window of its own samples. `lay_out` makes an array of a window of this rank's samples. Communicates nothing.
    ///
    /// # Errors
    ///
    /// Shapes that differ, and those of `lay_out`.
    pub fn forecast<A: Array, E: From<Error>>(
        &self,
        prediction: &A,
        (target, local): (&A, &Tensor),
        weights: Weighting<A>,
        lay_out: impl Fn(&Tensor) -> Result<A, E>,
    ) -> Result<Forecast<A>, E> {
        let forecast = Forecast::new(prediction, target)?.weighted(weights)?;
        let Some(climatology) = &self.climatology else { return Ok(forecast) };
        let each = || {
            let climatology = climatology.f_to_device(local.device())?.f_to_kind(local.kind())?;
            climatology.f_unsqueeze(0)?.f_expand_as(local)
        };
        let each = each().context(|| "a climatology of other fields than the targets'".to_owned())?;
        Ok(forecast.with_climatology(&lay_out(&each)?)?)
    }
}
