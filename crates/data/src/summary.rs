//! Statistics of variables and of their changes, weighted by cell area.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::dataset::{Dataset, Window, choose};
use crate::grid::Dim;
use crate::{Error, Result, Statistics};

/// Statistics of one channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Name of its variable.
    pub variable: String,
    /// Name of the channel; of a scalar the variable's own.
    pub channel: String,
    /// Unit of the values.
    pub unit: Option<String>,
    /// Statistics of the values; `None` if all are missing.
    pub values: Option<Statistics>,
    /// Statistics of the changes from one frame to the next; `None` for samples without time, trajectories of one frame, and where
    /// one of two frames is always missing.
    pub changes: Option<Statistics>,
}

/// Returns the dim of latitudes, if there is one, and the weight of each of its points, 1 on average: the difference of the sines
/// of the latitudes that bound its cell, which is its area. Bounds are half-way between points, and at most at the poles.
///
/// A dim is one of latitudes by its unit (`degrees_north`) or its name (`lat`, `latitude`).
///
/// ```
/// use isobar_data::{Dim, area_weights};
///
/// let dim = Dim { name: "lat".into(), unit: None, coordinates: vec![60.0, 0.0, -60.0], periodic: false };
/// let (_, weights) = area_weights(&[dim]).unwrap();
/// // Cells from 90 to 30, 30 to -30 and -30 to -90 degrees: a quarter, a half and a quarter of the sphere.
/// assert!(weights.iter().zip([0.75, 1.5, 0.75]).all(|(found, exact)| (found - exact).abs() < 1e-12));
/// ```
pub fn area_weights(dims: &[Dim]) -> Option<(usize, Vec<f64>)> {
    let is_latitude = |dim: &Dim| {
        let unit =
            dim.unit.as_deref().is_some_and(|unit| unit.starts_with("degree") && unit.contains("north"));
        unit || ["lat", "latitude"].contains(&dim.name.to_lowercase().as_str())
    };
    let at = dims.iter().position(is_latitude)?;
    let points = &dims[at].coordinates;
    if points.len() < 2 || !points.iter().all(|latitude| latitude.abs() <= 90.0 + 1e-6) {
        return None;
    }
    let last = points.len() - 1;
    let bound = |before: usize| {
        let (one, other) = (points[before - 1], points[before]);
        0.5 * (one + other)
    };
    let area = |point: usize| {
        // The outermost cells end as far beyond their points as they begin before them.
        let low = if point == 0 { 2.0 * points[0] - bound(1) } else { bound(point) };
        let high = if point == last { 2.0 * points[last] - bound(last) } else { bound(point + 1) };
        let sine = |latitude: f64| latitude.clamp(-90.0, 90.0).to_radians().sin();
        (sine(high) - sine(low)).abs()
    };
    let areas: Vec<f64> = (0..points.len()).map(area).collect();
    let mean = areas.iter().sum::<f64>() / areas.len() as f64;
    (mean > 0.0).then(|| (at, areas.into_iter().map(|area| area / mean).collect()))
}

/// Computes statistics of variables and of their changes over some samples in float64, weighted by cell area where a dim has
/// latitudes. Reads each value once, and one more frame a portion; memory is bounded. Minima and maxima have no weights.
/// `progress` is called with the bytes read so far, and those of all.
///
/// # Errors
/// A variable or sample that does not exist, an empty range, and the errors of [`Dataset::read`].
pub fn summarize(
    data: &dyn Dataset,
    variables: &[&str],
    samples: Range<usize>,
    mut progress: impl FnMut(u64, u64),
) -> Result<Vec<Summary>> {
    if samples.is_empty() || samples.end > data.samples() {
        let asked = format!("{samples:?}");
        return Err(Error::OutOfRange { what: "sample range".to_owned(), asked, available: data.samples() });
    }
    let chosen = choose(data, variables)?;
    let extents: Vec<usize> = data.dims().iter().map(|dim| dim.coordinates.len()).collect();
    let frames = data.times().map_or(1, <[f64]>::len);
    let channels: usize = chosen.iter().map(|variable| variable.channels.len()).sum();
    let points = extents.iter().map(|&extent| extent as u64).product::<u64>();
    let all = points * (channels * frames * 4) as u64 * samples.len() as u64;
    let weights = area_weights(data.dims());
    let mut read = 0;
    let mut summaries = Vec::new();
    for variable in chosen {
        let count = variable.channels.len();
        let mut sums = vec![[Sums::default(); 2]; count];
        for sample in samples.clone() {
            for Portion { frames: own, rows } in portions(frames, count, &extents) {
                // One frame more, for the change to it.
                let end = (own.end + 1).min(frames);
                let mut window: Vec<Range<usize>> = extents.iter().map(|&extent| 0..extent).collect();
                window[0] = rows;
                let window = Window { frames: own.start..end, points: window };
                let values = data.read(&window, &[sample], &[&variable.name])?.f_select(0, 0)?;
                let values = values.f_to_kind(Kind::Double)?;
                let weights = weights
                    .as_ref()
                    .map(|(dim, weights)| weigh(*dim, weights, &window.points))
                    .transpose()?;
                let steps = (end - own.start - 1) as i64;
                let changes = values.f_narrow(0, 1, steps)?.f_sub(&values.f_narrow(0, 0, steps)?)?;
                let values = values.f_narrow(0, 0, own.len() as i64)?;
                for (channel, sums) in sums.iter_mut().enumerate() {
                    for (sums, values) in sums.iter_mut().zip([&values, &changes]) {
                        sums.push(&values.f_select(1, channel as i64)?, weights.as_ref())?;
                    }
                }
                read += values.numel() as u64 * 4;
                progress(read, all);
            }
        }
        for (channel, [values, changes]) in variable.channels.iter().zip(sums) {
            summaries.push(Summary {
                variable: variable.name.clone(),
                channel: channel.clone(),
                unit: variable.unit.clone(),
                values: values.statistics(),
                changes: changes.statistics(),
            });
        }
    }
    Ok(summaries)
}

/// Weights of a window's points, as a tensor that broadcasts to `[frame, x, …]`.
fn weigh(dim: usize, weights: &[f64], points: &[Range<usize>]) -> Result<Tensor> {
    let mut view = vec![1; points.len()];
    view[dim] = points[dim].len() as i64;
    Ok(Tensor::f_from_slice(&weights[points[dim].clone()])?.f_view(&view[..])?)
}

/// Frames, and rows along the first dim, to read at a time.
struct Portion {
    frames: Range<usize>,
    rows: Range<usize>,
}

fn portions(frames: usize, channels: usize, extents: &[usize]) -> Vec<Portion> {
    let rows = extents[0];
    let row = (channels * size_of::<f64>()).saturating_mul(extents[1..].iter().product()).max(1);
    let together = (PORTION / row / 2).clamp(1, rows.max(1));
    let steps = (PORTION / row.saturating_mul(together)).clamp(1, frames.max(1));
    let starts = (0..rows).step_by(together);
    let cut = |start: usize, step: usize, end: usize| start..(start + step).min(end);
    starts
        .flat_map(|row| {
            (0..frames).step_by(steps).map(move |frame| Portion {
                frames: cut(frame, steps, frames),
                rows: cut(row, together, rows),
            })
        })
        .collect()
}

/// Bytes that a portion has in float64, about.
const PORTION: usize = 64 << 20;

/// Weighted sums of values, merged without loss of digits (Chan, Golub and LeVeque 1979).
#[derive(Clone, Copy, Debug)]
struct Sums {
    count: u64,
    weight: f64,
    mean: f64,
    squares: f64,
    min: f64,
    max: f64,
}

impl Default for Sums {
    fn default() -> Self {
        Self { count: 0, weight: 0.0, mean: 0.0, squares: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY }
    }
}

impl Sums {
    /// Adds values `[frame, x, …]`, but for those that are missing, NaN.
    fn push(&mut self, values: &Tensor, weights: Option<&Tensor>) -> Result<()> {
        let there = values.f_isnan()?.f_logical_not()?;
        if there.f_all()?.f_int64_value(&[])? == 1 {
            return self.push_all(values, weights);
        }
        let weights =
            weights.map(|weights| weights.f_expand_as(values)?.f_masked_select(&there)).transpose()?;
        self.push_all(&values.f_masked_select(&there)?, weights.as_ref())
    }

    /// Adds values, with a weight for each.
    fn push_all(&mut self, values: &Tensor, weights: Option<&Tensor>) -> Result<()> {
        let count = values.numel();
        if count == 0 {
            return Ok(());
        }
        let sum = |values: &Tensor| -> Result<f64> { Ok(values.f_sum(Kind::Double)?.f_double_value(&[])?) };
        let weighted = |values: Tensor| match weights {
            Some(weights) => Ok::<_, Error>(values.f_mul(weights)?),
            None => Ok(values),
        };
        let weight = match weights {
            Some(weights) => sum(&weights.f_expand_as(values)?)?,
            None => count as f64,
        };
        let mean = sum(&weighted(values.shallow_clone())?)? / weight;
        let squares = sum(&weighted(values.f_sub_scalar(mean)?.f_square()?)?)?;
        let total = self.weight + weight;
        let distance = mean - self.mean;
        self.squares += squares + distance * distance * self.weight * weight / total;
        self.mean += distance * weight / total;
        self.weight = total;
        self.count += count as u64;
        self.min = self.min.min(values.f_min()?.f_double_value(&[])?);
        self.max = self.max.max(values.f_max()?.f_double_value(&[])?);
        Ok(())
    }

    /// Returns `None` of no values.
    fn statistics(&self) -> Option<Statistics> {
        let Self { count, mean, min, max, .. } = *self;
        let std = (self.squares / self.weight).max(0.0).sqrt();
        (count > 0).then_some(Statistics { count, mean, std, min, max })
    }
}
