//! Statistics of a data set that several ranks read together, and a digest by which they know that it is the same.

use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::sync::Arc;

use isobar_torch::memory::to_vec;

use crate::adapt::Frames;
use crate::dataset::{Dataset, Window, choose, frame_count};
use crate::{Result, Statistics};

/// Bytes of a portion, about.
const PORTION: usize = 64 << 20;
/// Samples of which a digest reads a few points.
const PROBES: usize = 8;
/// Points along each dim that a digest reads.
const PROBE_POINTS: usize = 8;

/// Samples and frames that one rank takes statistics of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataPortion {
    /// Numbers of the samples, or trajectories.
    pub samples: Range<usize>,
    /// Frames of each trajectory; `0..1` for samples without time.
    pub frames: Range<usize>,
}

impl DataPortion {
    /// Computes [`Dataset::statistics`] of this portion. Missing values of `data` are NaN: numbers that replace them would count.
    ///
    /// # Errors
    /// Those of [`Dataset::statistics`].
    pub fn statistics(&self, data: &Arc<dyn Dataset>, variables: &[&str]) -> Result<Vec<Option<Statistics>>> {
        within(data, &self.frames)?.statistics(variables, self.samples.clone())
    }

    /// Computes [`Dataset::change_statistics`] of the changes from the frames of this portion to the next ones. A portion of only the
    /// last frame has no changes and returns an empty list.
    ///
    /// # Errors
    /// Those of [`Dataset::change_statistics`].
    pub fn change_statistics(
        &self,
        data: &Arc<dyn Dataset>,
        variables: &[&str],
    ) -> Result<Vec<Option<Statistics>>> {
        let all = frame_count(&**data);
        // One frame more: the change to the first frame of the next portion belongs to this one.
        let frames = self.frames.start..(self.frames.end + 1).min(all);
        if frames.len() < 2 && frames.len() < all {
            return Ok(Vec::new());
        }
        within(data, &frames)?.change_statistics(variables, self.samples.clone())
    }
}

/// Returns a data set with only these frames.
fn within(data: &Arc<dyn Dataset>, frames: &Range<usize>) -> Result<Arc<dyn Dataset>> {
    match frames.len() == frame_count(&**data) {
        true => Ok(Arc::clone(data)),
        false => Ok(Arc::new(Frames::range_of(Arc::clone(data), frames.clone())?)),
    }
}

/// Cuts a range of samples into portions to take statistics of, each of about 64 MiB: of several samples, or of frames of one sample
/// that is larger. A portion has at least one frame. Portions depend on the data set alone, so [`Statistics::merged`] gives
/// the same numbers for any number of ranks.
///
/// # Errors
/// Variables that the data set does not have.
pub fn portions(
    data: &(impl Dataset + ?Sized),
    variables: &[&str],
    samples: Range<usize>,
) -> Result<Vec<DataPortion>> {
    portions_of(data, variables, samples, usize::MAX)
}

/// Cuts a range of samples as [`portions`] does, into larger portions where there would be more than about `most`: a chunk that
/// reaches over several portions is unpacked for each.
///
/// # Errors
/// Variables that the data set does not have.
pub fn portions_of(
    data: &(impl Dataset + ?Sized),
    variables: &[&str],
    samples: Range<usize>,
    most: usize,
) -> Result<Vec<DataPortion>> {
    let channels: usize = choose(data, variables)?.iter().map(|variable| variable.channels.len()).sum();
    let points = data.dims().iter().fold(channels, |all, dim| all.saturating_mul(dim.coordinates.len()));
    let frame = points.saturating_mul(size_of::<f32>()).max(1);
    let frames = frame_count(data);
    let sample = frame.saturating_mul(frames.max(1));
    let bytes = PORTION.max(sample.saturating_mul(samples.len()) / most.max(1));
    let frames_at_once = (bytes / frame).clamp(1, frames.max(1));
    // 1 for a sample that is cut along its frames.
    let samples_at_once = (bytes / sample).max(1);
    let cut = |range: Range<usize>, step: usize| -> Vec<Range<usize>> {
        range.clone().step_by(step).map(|start| start..range.end.min(start.saturating_add(step))).collect()
    };
    let of_samples = |samples: Range<usize>| {
        let each = cut(0..frames, frames_at_once).into_iter();
        each.map(move |frames| DataPortion { samples: samples.clone(), frames })
    };
    Ok(cut(samples, samples_at_once).into_iter().flat_map(of_samples).collect())
}

/// Merges statistics of portions, channel by channel, in the order given: `None` of a channel without a value in any portion.
///
/// # Errors
/// Statistics of no values.
pub fn merge_channels(portions: &[Vec<Option<Statistics>>]) -> Result<Vec<Option<Statistics>>> {
    let channels = portions.iter().map(Vec::len).max().unwrap_or(0);
    let of_channel = |channel: usize| {
        let all: Vec<Statistics> = portions.iter().filter_map(|own| own.get(channel).copied()?).collect();
        match all[..] {
            [] => Ok(None),
            // Not through its variance and back.
            [only] => Ok(Some(only)),
            _ => Statistics::merged(&all).map(Some),
        }
    };
    (0..channels).map(of_channel).collect()
}

/// Computes a digest of a data set: its metadata, and the values of some variables at a few points of a few of these samples. Data
/// sets with other values have other digests with high probability, though not if they differ in single points.
///
/// # Errors
/// Those of [`Dataset::read`].
pub fn digest(data: &(impl Dataset + ?Sized), variables: &[&str], samples: Range<usize>) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    let mut numbers = |values: &[f64]| {
        hasher.write_usize(values.len());
        values.iter().for_each(|value| hasher.write_u64(value.to_bits()));
    };
    numbers(&[data.samples() as f64]);
    numbers(data.times().unwrap_or_default());
    data.dims().iter().for_each(|dim| numbers(&dim.coordinates));
    for variable in choose(data, variables)? {
        hasher.write(variable.name.as_bytes());
        hasher.write(variable.unit.unwrap_or_default().as_bytes());
        hasher.write_usize(variable.channels.len());
    }
    let frames = frame_count(data);
    let probes = PROBES.min(samples.len());
    for probe in 0..probes {
        // From the first to the last, at frames and points that move along.
        let spread = |extent: usize| probe * extent.saturating_sub(1) / probes.saturating_sub(1).max(1);
        let points = data.dims().iter().map(|dim| {
            let (extent, length) = (dim.coordinates.len(), PROBE_POINTS.min(dim.coordinates.len()));
            let start = spread(extent).min(extent - length);
            start..start + length
        });
        let frame = spread(frames);
        let window = Window { frames: frame..frame + 1, points: points.collect() };
        let values = data.read(&window, &[samples.start + spread(samples.len())], variables)?;
        let values: Vec<f32> = to_vec(&values.f_contiguous()?)?;
        values.iter().for_each(|value| hasher.write_u32(value.to_bits()));
    }
    Ok(hasher.finish())
}
