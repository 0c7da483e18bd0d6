//! Metrics over samples, variables and lead times.

use super::{Forecast, MetricArray, MetricKind};
use crate::error::Result;
use crate::loss::numbers;
use crate::variables::{Variable, significant};

/// Metrics at one lead time.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Lead time in steps, from 1.
    pub step: usize,
    /// For each metric its name, and its value for each variable; `None` of a variable without a point that counts in any sample.
    pub metrics: Vec<(&'static str, Vec<Option<f64>>)>,
}

impl Scores {
    /// Returns the value of a metric for a variable, both by their places; `None` also where no point counts.
    pub fn get(&self, metric: usize, variable: usize) -> Option<f64> {
        self.metrics.get(metric)?.1.get(variable).copied().flatten()
    }
}

/// Computes metrics over all samples of a forecast: for each metric its value for each channel, NaN of a channel without a point that
/// counts in any sample. For sharded fields all ranks of their mesh call, and all get the values.
///
/// # Errors
///
/// Those of the metrics.
pub fn scores_of<A: MetricArray>(metrics: &[MetricKind], forecast: &Forecast<A>) -> Result<Vec<Vec<f64>>> {
    let mut board = Scoreboard::new(metrics, 1);
    board.add(1, forecast)?;
    let numbers =
        |values: Vec<Option<f64>>| values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect();
    Ok(board
        .scores()
        .into_iter()
        .flat_map(|scores| scores.metrics)
        .map(|(_, values)| numbers(values))
        .collect())
}

/// Number of summands of a sample.
pub(crate) fn width(metrics: &[MetricKind], channels: usize) -> usize {
    metrics.iter().map(|metric| metric.count() + 1).sum::<usize>() * channels
}

/// Computes the summands of each sample, by metric: its terms, by term and channel, and for each channel 1, or 0 (of terms, too) if no
/// point counts. All ranks of the fields' mesh call.
pub(crate) fn summands<A: MetricArray>(
    metrics: &[MetricKind],
    forecast: &Forecast<A>,
) -> Result<Vec<Vec<f64>>> {
    let _no_grad = tch::no_grad_guard();
    let samples = forecast.target().extent(0)?.max(0) as usize;
    let mut terms = Vec::new();
    for metric in metrics {
        terms.extend(A::terms(&**metric, forecast)?);
    }
    if terms.is_empty() {
        return Ok(vec![Vec::new(); samples]);
    }
    // One exchange for all metrics: [sample, term, channel].
    let all = numbers(&A::stack(&terms.iter().collect::<Vec<_>>(), 1)?)?;
    let width = (all.len() / samples.max(1)).max(1);
    Ok(all.chunks(width).map(|sample| counted(metrics, sample)).collect())
}

/// Replaces each channel's number of points by 1; by 0, and its terms by 0, where no point counts.
fn counted(metrics: &[MetricKind], sample: &[f64]) -> Vec<f64> {
    let channels = sample.len() / width(metrics, 1).max(1);
    let mut rest = sample;
    let mut all = Vec::with_capacity(sample.len());
    for metric in metrics {
        let (terms, others) = rest.split_at((metric.count() * channels).min(rest.len()));
        let (points, others) = others.split_at(channels.min(others.len()));
        rest = others;
        let counts = |at: usize| points.get(at % channels).is_some_and(|&points| points > 0.0);
        all.extend(terms.iter().enumerate().map(|(at, &term)| if counts(at) { term } else { 0.0 }));
        all.extend((0..points.len()).map(|at| f64::from(counts(at))));
    }
    all
}

/// Computes the values from sums of summands: for each metric those of each channel.
pub(crate) fn values(
    metrics: &[MetricKind],
    channels: usize,
    sums: &[f64],
) -> Vec<(&'static str, Vec<Option<f64>>)> {
    let mut rest = sums;
    let mut of_metric = |metric: &MetricKind| {
        let (own, others) = rest.split_at(((metric.count() + 1) * channels).min(rest.len()));
        rest = others;
        let value = |channel: usize| {
            let mut sums: Vec<f64> = own.iter().skip(channel).step_by(channels).copied().collect();
            let samples = sums.pop().filter(|&samples| samples > 0.0)?;
            sums.iter_mut().for_each(|sum| *sum /= samples);
            Some(metric.value(&sums))
        };
        (metric.name(), (0..channels).map(value).collect())
    };
    metrics.iter().map(&mut of_metric).collect()
}

/// Metrics that are collected sample by sample, over lead times.
///
/// ```
/// use isobar_train::metric::{Bias, Forecast, Rmse, Scoreboard};
/// use tch::Tensor;
///
/// let mut board = Scoreboard::new(&[Rmse {}.into(), Bias {}.into()], 2);
/// for (step, prediction) in [(1, [1.0, 1.0]), (2, [3.0, -3.0])] {
///     let prediction = Tensor::from_slice(&prediction).view([1, 1, 2]);
///     board.add(step, &Forecast::new(&prediction, &prediction.zeros_like())?)?;
/// }
/// let scores = board.scores();
/// assert_eq!((scores[0].step, scores[0].get(0, 0), scores[0].get(1, 0)), (1, Some(1.0), Some(1.0)));
/// assert_eq!((scores[1].step, scores[1].get(0, 0), scores[1].get(1, 0)), (2, Some(3.0), Some(0.0)));
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Scoreboard {
    metrics: Vec<MetricKind>,
    channels: usize,
    /// For each step the sums of summands; empty without samples.
    steps: Vec<Vec<f64>>,
}

impl Scoreboard {
    /// Makes a board of these metrics at lead times of 1 to `steps` steps.
    pub fn new(metrics: &[MetricKind], steps: usize) -> Self {
        Self { metrics: metrics.to_vec(), channels: 0, steps: vec![Vec::new(); steps] }
    }

    /// Returns the metrics.
    pub fn metrics(&self) -> &[MetricKind] {
        &self.metrics
    }

    /// Adds the samples of a forecast after `step` steps. Steps beyond those of the board are left out. For sharded fields all ranks
    /// of their mesh call.
    ///
    /// # Errors
    ///
    /// Those of the metrics.
    pub fn add<A: MetricArray>(&mut self, step: usize, forecast: &Forecast<A>) -> Result<()> {
        if self.metrics.is_empty() {
            return Ok(());
        }
        let Some(sums) = step.checked_sub(1).and_then(|at| self.steps.get_mut(at)) else {
            return Ok(());
        };
        self.channels = forecast.target().extent(1)?.max(0) as usize;
        for sample in summands(&self.metrics, forecast)? {
            sums.resize(sample.len(), 0.0);
            sums.iter_mut().zip(sample).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    }

    /// Returns the metrics at each lead time with samples.
    pub fn scores(&self) -> Vec<Scores> {
        let known = self.steps.iter().enumerate().filter(|(_, sums)| !sums.is_empty());
        let score = |(at, sums): (usize, &Vec<f64>)| Scores {
            step: at + 1,
            metrics: values(&self.metrics, self.channels, sums),
        };
        known.map(score).collect()
    }
}

impl Scores {
    /// Returns the rows of a table: a header, and for each metric and variable the values at the first and at the last of these lead
    /// times. Values in the unit of the variable say it. Empty without metrics.
    pub fn table(all: &[Self], metrics: &[MetricKind], variables: &[Variable]) -> Vec<[String; 5]> {
        let (Some(first), Some(last)) = (all.first(), all.last()) else { return Vec::new() };
        let after = |scores: &Self| match scores.step {
            1 => "after 1 step".to_owned(),
            steps => format!("after {steps} steps"),
        };
        let several = last.step > first.step;
        let header = ["metric".to_owned(), "variable".to_owned(), after(first)];
        let end = if several { after(last) } else { String::new() };
        let [metric, variable, start] = header;
        let mut rows = vec![[metric, variable, start, end, String::new()]];
        for (at, metric) in metrics.iter().enumerate() {
            for (index, variable) in variables.iter().enumerate() {
                let value = |scores: &Self| scores.get(at, index).map_or_else(|| "-".to_owned(), significant);
                let unit = variable.unit.clone().filter(|_| metric.has_unit()).unwrap_or_default();
                let end = if several { value(last) } else { String::new() };
                rows.push([metric.name().to_owned(), variable.name.clone(), value(first), end, unit]);
            }
        }
        if rows.len() == 1 { Vec::new() } else { rows }
    }
}
