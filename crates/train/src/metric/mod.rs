//! Metrics of forecasts, per variable and lead time, on physical values: a file each, which registers it. How they are summed over
//! samples and ranks is the engine's; this module never knows where fields come from.

mod acc;
mod bias;
mod crps;
mod forecast;
mod mae;
mod nrmse;
mod report;
mod rmse;
mod scores;
mod spectra;
mod spectrum;
mod spread;
mod spread_skill;
mod vrmse;

use std::fmt;
use std::sync::Arc;

use isobar_registry::{Choice, Entry, Family, Holds, Registered};
use isobar_shard::ShardTensor;
use tch::Tensor;

pub use self::acc::Acc;
pub use self::bias::Bias;
pub use self::crps::CrpsScore;
pub use self::forecast::Forecast;
pub use self::mae::MaeScore;
pub use self::nrmse::Nrmse;
pub use self::report::Report;
pub use self::rmse::Rmse;
pub use self::scores::{Scoreboard, Scores, scores_of};
pub(crate) use self::scores::{summands, values, width};
pub use self::spectra::{EnergySpectra, Spectra};
pub use self::spectrum::Spectrum;
pub use self::spread::Spread;
pub use self::spread_skill::SpreadSkill;
pub use self::vrmse::Vrmse;
use crate::error::Result;
use crate::loss::LossArray;

/// Metric of forecasts that a TOML file can name: `metrics.report = ["NAME"]`.
///
/// Its name and its keys are those of [`Registered`]. [`register_metric!`](crate::register_metric) makes it known to every program
/// that is linked with the crate it stands in. It is written once over [`Array`](isobar_array::Array), for dense and for sharded
/// fields.
///
/// ```
/// use isobar_train::metric::{Forecast, Metric, MetricArray, MetricKind, scores_of};
/// use isobar_train::{Registered, Result};
/// use isobar_array::Unary;
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
/// use tch::Tensor;
///
/// /// Largest absolute error of a point, the mean over samples.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields)]
/// struct Worst {}
///
/// impl Registered for Worst {
///     const NAME: &'static str = "worst";
///     const SUMMARY: &'static str = "Largest absolute error of a point.";
/// }
///
/// impl Metric for Worst {
///     fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>> {
///         let error = forecast.error()?.unary(Unary::Abs)?;
///         Ok(vec![error.reduce(isobar_array::Reduction::Max, &forecast.spatial(), false)?])
///     }
/// }
///
/// isobar_train::register_metric!(Worst);
///
/// let worst: MetricKind = serde_json::from_str(r#""worst""#)?;
/// let (prediction, target) = (Tensor::from_slice(&[1.0, 3.0]), Tensor::from_slice(&[1.5, 1.0]));
/// let forecast = Forecast::new(&prediction.view([1, 1, 2]), &target.view([1, 1, 2]))?;
/// assert_eq!(scores_of(&[worst], &forecast)?, [[2.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Metric: fmt::Debug + Send + Sync {
    /// Number of arrays that [`terms`](Self::terms) returns.
    fn count(&self) -> usize {
        1
    }

    /// Computes what is averaged over samples: [`count`](Self::count) arrays, `[sample, channel]`. For sharded fields all ranks of
    /// their mesh call.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    fn terms<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<Vec<A>>;

    /// Counts the points that the metric is over, `[sample, channel]` or a shape that broadcasts to it; by default those that a mask
    /// counts. Terms without a point are left out of the means over samples. For sharded fields all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    fn points<A: MetricArray>(&self, forecast: &Forecast<A>) -> Result<A> {
        forecast.points()
    }

    /// Computes the metric of a variable from the means of its terms over samples; by default the first.
    fn value(&self, means: &[f64]) -> f64 {
        means.first().copied().unwrap_or(f64::NAN)
    }

    /// Returns a number that is the lower the better the value is, by which `train.best` compares checkpoints; by default the
    /// value.
    fn cost(&self, value: f64) -> f64 {
        value
    }

    /// Returns whether values have the unit of their variable, so that a mean over variables would mix units.
    fn has_unit(&self) -> bool {
        false
    }

    /// Returns whether the metric needs a [climatology](Forecast::climatology).
    fn needs_climatology(&self) -> bool {
        false
    }

    /// Checks that settings are in their ranges.
    ///
    /// # Errors
    ///
    /// A setting out of its range.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Registers a type as a metric: see [`Metric`](crate::metric::Metric).
#[macro_export]
macro_rules! register_metric {
    ($metric:ty) => {
        $crate::inventory::submit! { $crate::metric::MetricEntry::of::<$metric>() }
    };
}

isobar_registry::collected! {
    /// Entry of the registry of metrics.
    pub struct MetricEntry(Metrics);
}

/// The family of the metrics.
#[derive(Debug)]
pub struct Metrics;

impl Family for Metrics {
    const NOUN: &'static str = "metric";
    const SUMMARY: &'static str = "Metric of forecasts, on physical values.";
    const SHORT: bool = true;
    type Member = dyn AnyMetric;

    fn entries() -> Vec<Entry<Self>> {
        entries()
    }

    fn standard() -> Choice<Self> {
        Rmse {}.into()
    }
}

impl<M: Metric + Registered> Holds<M> for Metrics {
    fn hold(metric: M) -> Arc<dyn AnyMetric> {
        Arc::new(metric)
    }
}

/// A metric of a run: any registered one.
pub type MetricKind = Choice<Metrics>;

/// A [`Metric`] of any type.
pub trait AnyMetric: fmt::Debug + Send + Sync {
    /// Returns [`Metric::count`].
    fn count(&self) -> usize;

    /// Computes the terms of dense fields, and then the points that count.
    ///
    /// # Errors
    ///
    /// Those of [`Metric::terms`].
    fn dense(&self, forecast: &Forecast<Tensor>) -> Result<Vec<Tensor>>;

    /// Computes the terms of sharded fields, and then the points that count. All ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// Those of [`Metric::terms`].
    fn sharded(&self, forecast: &Forecast<ShardTensor>) -> Result<Vec<ShardTensor>>;

    /// Returns [`Metric::value`].
    fn value(&self, means: &[f64]) -> f64;

    /// Returns [`Metric::cost`].
    fn cost(&self, value: f64) -> f64;

    /// Returns [`Metric::has_unit`].
    fn has_unit(&self) -> bool;

    /// Returns [`Metric::needs_climatology`].
    fn needs_climatology(&self) -> bool;

    /// Checks that settings are in their ranges.
    ///
    /// # Errors
    ///
    /// A setting out of its range.
    fn check(&self) -> Result<()>;
}

impl<M: Metric> AnyMetric for M {
    fn count(&self) -> usize {
        Metric::count(self)
    }

    fn dense(&self, forecast: &Forecast<Tensor>) -> Result<Vec<Tensor>> {
        terms_and_points(self, forecast)
    }

    fn sharded(&self, forecast: &Forecast<ShardTensor>) -> Result<Vec<ShardTensor>> {
        terms_and_points(self, forecast)
    }

    fn value(&self, means: &[f64]) -> f64 {
        Metric::value(self, means)
    }

    fn cost(&self, value: f64) -> f64 {
        Metric::cost(self, value)
    }

    fn has_unit(&self) -> bool {
        Metric::has_unit(self)
    }

    fn needs_climatology(&self) -> bool {
        Metric::needs_climatology(self)
    }

    fn check(&self) -> Result<()> {
        Metric::check(self)
    }
}

fn terms_and_points<M: Metric, A: MetricArray>(metric: &M, forecast: &Forecast<A>) -> Result<Vec<A>> {
    let mut all = metric.terms(forecast)?;
    let extents = [forecast.target().extent(0)?, forecast.target().extent(1)?];
    all.push(metric.points(forecast)?.expand(&extents)?);
    Ok(all)
}

/// Arrays that registered metrics are computed of: `tch::Tensor` and `ShardTensor`.
pub trait MetricArray: LossArray {
    /// Computes the terms of `metric`, and then the points that count, each `[sample, channel]`.
    ///
    /// # Errors
    ///
    /// Those of [`Metric::terms`].
    fn terms(metric: &dyn AnyMetric, forecast: &Forecast<Self>) -> Result<Vec<Self>>;
}

impl MetricArray for Tensor {
    fn terms(metric: &dyn AnyMetric, forecast: &Forecast<Self>) -> Result<Vec<Self>> {
        metric.dense(forecast)
    }
}

impl MetricArray for ShardTensor {
    fn terms(metric: &dyn AnyMetric, forecast: &Forecast<Self>) -> Result<Vec<Self>> {
        metric.sharded(forecast)
    }
}
