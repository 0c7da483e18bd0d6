//! Frames that requests need, and their reading.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use super::options::{StreamOptions, TargetWindow};
use crate::dataset::{Dataset, Window, choose};
use crate::halo::HaloWindow;
use crate::samples::Request;
use crate::steps::check_steps;
use crate::{Error, Result};

/// A frame of a trajectory, or the only one of a sample without time: the sample of the data set, and the frame.
pub(super) type Item = (usize, usize);

/// This rank's window of the variables of a frame, `[channel, x, …]`.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) input: Tensor,
    /// Of samples without time: the fields that the network maps to.
    pub(super) target: Option<Tensor>,
}

/// The rows of some items.
pub(super) type Rows = BTreeMap<Item, Row>;

/// Number of sources so far.
static SOURCES: AtomicU64 = AtomicU64::new(0);

/// A rank's window of some samples of a data set.
#[derive(Debug)]
pub(super) struct Source {
    /// A number of its own in this process.
    id: u64,
    data: Arc<dyn Dataset>,
    /// Samples of the data set, or trajectories.
    samples: Range<usize>,
    window: HaloWindow,
    inputs: Vec<String>,
    targets: Vec<String>,
    /// The data set of the targets and the window of it, if they are not those of the inputs.
    targets_from: Option<(Arc<dyn Dataset>, HaloWindow)>,
    /// Most steps of a sample.
    steps: usize,
    /// Frames from the start of a sample to that of the next.
    stride: usize,
    item_bytes: u64,
}

impl Source {
    /// A range of samples, or trajectories, of a data set.
    pub(super) fn new(
        (data, samples): (Arc<dyn Dataset>, Range<usize>),
        options: &StreamOptions,
    ) -> Result<Self> {
        let StreamOptions { inputs, targets, stride, .. } = options;
        let (steps, stride) = (options.steps.most(), *stride);
        let frames = data.times().map_or(2, <[f64]>::len);
        if samples.start > samples.end || samples.end > data.samples() {
            let (asked, available) = (format!("{samples:?}"), data.samples());
            return Err(Error::OutOfRange { what: "sample range".to_owned(), asked, available });
        }
        if steps == 0 || stride == 0 || frames <= steps {
            return Err(Error::Invalid(format!(
                "{steps} steps from every {stride}th frame can't be taken of {}: expected 1 to {} steps and a stride of 1 or more",
                data.path().display(),
                frames.saturating_sub(1)
            )));
        }
        let window = with_halo(&*data, &options.window, &options.halo)?;
        let of_their_own = |TargetWindow { data: other, points }: &TargetWindow| -> Result<_> {
            check_pairs(&*data, &**other)?;
            Ok((other.clone(), with_halo(&**other, points, &[])?))
        };
        let targets_from = options.targets_from.as_ref().map(of_their_own).transpose()?;
        let of_targets = match (data.times(), &targets_from) {
            (Some(_), _) => 0,
            (None, Some((other, window))) => values_in(&**other, targets, window)?,
            (None, None) => values_in(&*data, targets, &window)?,
        };
        let values = values_in(&*data, inputs, &window)?.saturating_add(of_targets);
        let item_bytes = values.saturating_mul(size_of::<f32>() as u64);
        let (inputs, targets) = (inputs.clone(), targets.clone());
        let id = SOURCES.fetch_add(1, Ordering::Relaxed);
        Ok(Self { id, data, samples, window, inputs, targets, targets_from, steps, stride, item_bytes })
    }

    /// Number of the source in this process.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Path of the data set.
    pub(super) fn path(&self) -> &Path {
        self.data.path()
    }

    /// Times of the frames of a trajectory; `None` for samples without time.
    pub(super) fn times(&self) -> Option<&[f64]> {
        self.data.times()
    }

    /// Most steps of a sample.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// Bytes of a row.
    pub(super) fn item_bytes(&self) -> u64 {
        self.item_bytes
    }

    /// Samples that each trajectory gives.
    fn pieces(&self) -> usize {
        self.times().map_or(1, |times| times.len().saturating_sub(self.steps).div_ceil(self.stride))
    }

    /// Number of samples.
    pub(super) fn len(&self) -> usize {
        self.samples.len() * self.pieces()
    }

    /// Returns the item of a sample's input.
    pub(super) fn first(&self, sample: usize) -> Result<Item> {
        let available = self.len();
        if sample >= available {
            return Err(Error::OutOfRange {
                what: "sample".to_owned(),
                asked: sample.to_string(),
                available,
            });
        }
        let pieces = self.pieces();
        Ok((self.samples.start + sample / pieces, sample % pieces * self.stride))
    }

    /// Returns the items that a request needs, each once.
    pub(super) fn items(&self, request: &Request) -> Result<BTreeSet<Item>> {
        check_steps(request.steps, self.steps)?;
        let more = if self.times().is_some() { request.steps } else { 0 };
        let mut items = BTreeSet::new();
        for &sample in &request.samples {
            let (sample, first) = self.first(sample)?;
            items.extend((first..=first + more).map(|frame| (sample, frame)));
        }
        Ok(items)
    }

    /// Reads the rows of some items: consecutive frames at once, and samples without time in one read.
    pub(super) fn read(&self, items: &BTreeSet<Item>) -> Result<Rows> {
        match self.times() {
            Some(_) => self.read_frames(items),
            None => self.read_pairs(items),
        }
    }

    fn read_frames(&self, items: &BTreeSet<Item>) -> Result<Rows> {
        let mut rows = Rows::new();
        for (sample, frames) in runs(items) {
            let window = self.window.at(frames.clone());
            let values = window.read(&*self.data, &[sample], &names(&self.inputs))?.f_select(0, 0)?;
            for (at, frame) in frames.enumerate() {
                let input = values.f_select(0, at as i64)?;
                rows.insert((sample, frame), Row { input, target: None });
            }
        }
        Ok(rows)
    }

    fn read_pairs(&self, items: &BTreeSet<Item>) -> Result<Rows> {
        if items.is_empty() {
            return Ok(Rows::new());
        }
        let samples: Vec<usize> = items.iter().map(|(sample, _)| *sample).collect();
        let [inputs, targets] = self.read_stills(&samples)?;
        let row = |(at, item): (usize, &Item)| -> Result<(Item, Row)> {
            let target = Some(targets.f_select(0, at as i64)?);
            Ok((*item, Row { input: inputs.f_select(0, at as i64)?, target }))
        };
        items.iter().enumerate().map(row).collect()
    }

    /// Input and target of no samples, `[0, channel, x, …]`.
    pub(super) fn empty(&self) -> Result<[Tensor; 2]> {
        self.read_stills(&[])
    }

    /// Reads inputs and targets of samples without time, `[sample, channel, x, …]`.
    fn read_stills(&self, samples: &[usize]) -> Result<[Tensor; 2]> {
        let read = |data: &dyn Dataset, window: &HaloWindow, variables: &[String]| -> Result<Tensor> {
            Ok(window.read(data, samples, &names(variables))?.f_select(1, 0)?)
        };
        let inputs = read(&*self.data, &self.window, &self.inputs)?;
        let targets = match &self.targets_from {
            Some((data, window)) => read(&**data, window, &self.targets)?,
            None => read(&*self.data, &self.window, &self.targets)?,
        };
        Ok([inputs, targets])
    }
}

/// A window of a frame with its halo; `halo` is empty for none.
fn with_halo(data: &dyn Dataset, points: &[Range<usize>], halo: &[usize]) -> Result<HaloWindow> {
    let none = vec![0; points.len()];
    HaloWindow::new(data, &Window::still(points), if halo.is_empty() { &none } else { halo })
}

/// Number of values of some variables in a window of a frame.
fn values_in(data: &dyn Dataset, variables: &[String], window: &HaloWindow) -> Result<u64> {
    let channels: usize =
        choose(data, &names(variables))?.iter().map(|variable| variable.channels.len()).sum();
    let extents = window.extents().into_iter();
    Ok(extents.fold(channels as u64, |values, extent| values.saturating_mul(extent as u64)))
}

/// Rejects targets of other samples than those of the inputs.
fn check_pairs(inputs: &dyn Dataset, targets: &dyn Dataset) -> Result<()> {
    let of = |data: &dyn Dataset| (data.samples(), data.times().is_some());
    if (of(inputs), of(targets)) == ((targets.samples(), false), (inputs.samples(), false)) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "targets of another data set need samples without time, as many as the inputs: {} has {}, and {} {}",
        inputs.path().display(),
        inputs.samples(),
        targets.path().display(),
        targets.samples()
    )))
}

/// Consecutive frames of each sample.
fn runs(items: &BTreeSet<Item>) -> Vec<(usize, Range<usize>)> {
    let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
    for &(sample, frame) in items {
        match runs.last_mut() {
            Some((last, frames)) if *last == sample && frames.end == frame => frames.end += 1,
            _ => runs.push((sample, frame..frame + 1)),
        }
    }
    runs
}

fn names(variables: &[String]) -> Vec<&str> {
    variables.iter().map(String::as_str).collect()
}

impl Row {
    /// Returns the values without a copy.
    pub(super) fn share(&self) -> Self {
        Self { input: self.input.shallow_clone(), target: self.target.as_ref().map(Tensor::shallow_clone) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_once_and_together() {
        let items = BTreeSet::from([(0, 3), (0, 4), (0, 6), (1, 7), (1, 8), (0, 5), (4, 0)]);
        assert_eq!(runs(&items), [(0, 3..7), (1, 7..9), (4, 0..1)]);
        assert!(runs(&BTreeSet::new()).is_empty());
    }
}
