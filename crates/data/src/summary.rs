//! Statistics of variables and of their changes, weighted by cell area.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::area::PointWeights;
use crate::dataset::{Dataset, Window, choose};
use crate::grid::DataVariable;
use crate::stats::ChannelStatistics;
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
    // A static variable has one frame, and a uniform one a point.
    let read_of = |variable: &DataVariable| {
        let frames = if variable.is_static { 1 } else { frames };
        let samples = if variable.is_static { samples.start..samples.start + 1 } else { samples.clone() };
        let extents = if variable.uniform { vec![1; extents.len()] } else { extents.clone() };
        (samples, frames, extents)
    };
    let bytes = |variable: &DataVariable| {
        let (samples, frames, extents) = read_of(variable);
        let points = extents.iter().map(|&extent| extent as u64).product::<u64>();
        points * (variable.channels.len() * frames * 4) as u64 * samples.len() as u64
    };
    let all = chosen.iter().map(bytes).sum();
    let weights = PointWeights::new(data.dims());
    let mut read = 0;
    let mut summaries = Vec::new();
    for variable in chosen {
        let count = variable.channels.len();
        let (mut of_values, mut of_changes) = (ChannelStatistics::default(), ChannelStatistics::default());
        let (samples, frames, extents) = read_of(&variable);
        for sample in samples {
            for Portion { frames: own, rows } in portions(frames, count, &extents) {
                // One frame more, for the change to it.
                let end = (own.end + 1).min(frames);
                let mut window: Vec<Range<usize>> = extents.iter().map(|&extent| 0..extent).collect();
                window[0] = rows;
                let window = Window { frames: own.start..end, points: window };
                let values = data.read(&window, &[sample], &[&variable.name])?.f_select(0, 0)?;
                let values = values.f_to_kind(Kind::Double)?;
                let weights = weights.within(&window.points);
                let steps = (end - own.start - 1) as i64;
                let changes = values.f_narrow(0, 1, steps)?.f_sub(&values.f_narrow(0, 0, steps)?)?;
                let values = values.f_narrow(0, 0, own.len() as i64)?;
                of_values.push(&values, &weights)?;
                of_changes.push(&changes, &weights)?;
                read += values.numel() as u64 * 4;
                progress(read, all);
            }
        }
        let pairs = of_values.finish()?.into_iter().zip(of_changes.finish()?);
        for (channel, (values, changes)) in variable.channels.iter().zip(pairs) {
            summaries.push(Summary {
                variable: variable.name.clone(),
                channel: channel.clone(),
                unit: variable.unit.clone(),
                values,
                changes,
            });
        }
    }
    Ok(summaries)
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
