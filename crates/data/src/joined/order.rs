//! The order of files along an axis, from their metadata.

use std::path::PathBuf;

use super::Join;
use super::handles::File;
use crate::adapt::{time_text, times_in};
use crate::calendar::TimeUnit;
use crate::dataset::Dataset;
use crate::gaps::is_gap;
use crate::{Error, Result};

/// Times of files, in the unit of the first one.
#[derive(Debug, Default)]
pub(super) struct Order {
    times: Vec<Vec<f64>>,
    unit: Option<TimeUnit>,
}

/// The axis, the files in their order, and the times of all.
type Ordered = (Join, Vec<usize>, Option<Vec<f64>>);

impl Order {
    /// Adds a file, beside the first one.
    ///
    /// # Errors
    /// Units of times that have nothing in common.
    pub(super) fn add(&mut self, first: &dyn Dataset, data: &dyn Dataset) -> Result<()> {
        let Some(times) = data.times() else { return Ok(()) };
        self.unit = first.time_unit().cloned();
        self.times.push(match first.time_unit() {
            Some(unit) if data.time_unit() != Some(unit) => times_in(data, unit)?,
            None if data.time_unit().is_some() => {
                return Err(Error::Config(format!(
                    "{} has times in {}, expected times without a unit as in {}",
                    data.path().display(),
                    data.time_unit().map(ToString::to_string).unwrap_or_default(),
                    first.path().display()
                )));
            }
            _ => times.to_vec(),
        });
        Ok(())
    }

    /// Puts the files in order along the axis, by default that of times if they differ.
    ///
    /// # Errors
    /// Gaps, overlaps, and files that do not fit.
    pub(super) fn finish(self, along: Option<Join>, files: &[File]) -> Result<Ordered> {
        let in_list = || (0..files.len()).collect::<Vec<usize>>();
        let Some(first) = self.times.first() else {
            if along == Some(Join::Time) {
                return Err(Error::Config(format!(
                    "data.join is \"time\", but samples of {} have no times; --set data.join=sample",
                    files.first().map_or_else(PathBuf::new, |file| file.path.clone()).display()
                )));
            }
            return Ok((Join::Sample, in_list(), None));
        };
        let other = self.times.iter().position(|times| !near(first, times));
        match (along, other) {
            (Some(Join::Time), _) | (None, Some(_)) => self.along_time(files),
            (_, None) => Ok((Join::Sample, in_list(), Some(first.clone()))),
            (Some(Join::Sample), Some(at)) => Err(Error::Config(format!(
                "{} has {}, expected {} as {}; trajectories of one data set have the same times (data.join is \"sample\")",
                files[at].path.display(),
                self.span(at),
                self.span(0),
                files[0].path.display()
            ))),
        }
    }

    fn along_time(mut self, files: &[File]) -> Result<Ordered> {
        let path = |at: usize| files[at].path.display();
        if let Some(at) = files.iter().position(|file| file.samples != files[0].samples) {
            return Err(Error::Config(format!(
                "{} has {} trajectories, expected {} as {}: files that follow each other in time have frames of the same ones",
                path(at),
                files[at].samples,
                files[0].samples,
                path(0)
            )));
        }
        let mut places: Vec<usize> = (0..files.len()).collect();
        let start = |at: usize| self.times[at].first().copied().unwrap_or_default();
        places.sort_by(|&one, &other| start(one).total_cmp(&start(other)));
        let largest =
            |at: usize| self.times[at].windows(2).map(|pair| pair[1] - pair[0]).fold(0.0_f64, f64::max);
        let between =
            |pair: &[usize]| start(pair[1]) - self.times[pair[0]].last().copied().unwrap_or_default();
        let mut all: Vec<f64> = places.windows(2).map(between).collect();
        all.sort_by(f64::total_cmp);
        let usual = all.get(all.len() / 2).copied().unwrap_or_default();
        for pair in places.windows(2) {
            let (one, other) = (pair[0], pair[1]);
            let gap = between(pair);
            if gap <= 0.0 {
                return Err(Error::Config(format!(
                    "the times of {} ({}) and {} ({}) overlap; leave one of them out, cut one, or, if they are trajectories of \
                     their own, --set data.join=sample",
                    path(one),
                    self.span(one),
                    path(other),
                    self.span(other)
                )));
            }
            // Files of one frame each have no step of their own.
            let step = match largest(one).max(largest(other)) {
                0.0 => usual,
                step => step,
            };
            if is_gap(gap, step) {
                return Err(Error::Config(format!(
                    "frames are missing between {} ({}) and {} ({}): {} from the last to the next where a step is {}; add the \
                     missing files, or take those of one side",
                    path(one),
                    self.span(one),
                    path(other),
                    self.span(other),
                    gap,
                    step
                )));
            }
        }
        let times = places.iter().flat_map(|&at| std::mem::take(&mut self.times[at])).collect();
        Ok((Join::Time, places, Some(times)))
    }

    /// First and last time of a file.
    fn span(&self, at: usize) -> String {
        let times = &self.times[at];
        let text = |time: Option<&f64>| time_text(self.unit.as_ref(), time);
        format!("{} to {}", text(times.first()), text(times.last()))
    }
}

/// Returns whether times are the same but for rounding.
fn near(one: &[f64], other: &[f64]) -> bool {
    let step = one.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min);
    let slack = if step.is_finite() { 1e-6 * step } else { 0.0 };
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| (one - other).abs() <= slack)
}
