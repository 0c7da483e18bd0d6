//! The frames of trajectories as samples without time.

use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::calendar::TimeUnit;
use crate::dataset::{Dataset, Window, cat, check_window, choose};

/// Each frame of each trajectory of a data set as a sample without time: those of the first trajectory in the order of their times,
/// then those of the next.
#[derive(Debug)]
pub(crate) struct Stills {
    data: Arc<dyn Dataset>,
    frames: usize,
}

impl Stills {
    /// Wraps a data set; one without times stays as it is.
    pub(crate) fn of(data: Arc<dyn Dataset>) -> Arc<dyn Dataset> {
        match data.times().map(<[f64]>::len) {
            None => data,
            Some(frames) => Arc::new(Self { data, frames }),
        }
    }

    /// Trajectory and frames of samples that follow each other.
    fn runs(&self, samples: &[usize]) -> Vec<(usize, Range<usize>)> {
        let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
        for sample in samples {
            let (trajectory, frame) = (sample / self.frames, sample % self.frames);
            match runs.last_mut() {
                Some((last, frames)) if *last == trajectory && frames.end == frame => frames.end += 1,
                _ => runs.push((trajectory, frame..frame + 1)),
            }
        }
        runs
    }
}

impl Dataset for Stills {
    forward_to_data!();

    fn samples(&self) -> usize {
        self.data.samples() * self.frames
    }

    fn file_starts(&self) -> Vec<(usize, usize)> {
        let starts = self.data.file_starts().into_iter();
        starts.map(|(sample, frame)| (sample * self.frames + frame, 0)).collect()
    }

    fn sample_times(&self) -> Option<Vec<f64>> {
        Some(self.data.times()?.repeat(self.data.samples()))
    }

    fn time_unit(&self) -> Option<&TimeUnit> {
        self.data.time_unit()
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        check_window(self, window, samples)?;
        if window.frames.is_empty() || samples.is_empty() {
            let channels: usize =
                choose(self, variables)?.iter().map(|variable| variable.channels.len()).sum();
            let shape = [samples.len(), window.frames.len(), channels].into_iter();
            let shape = shape.chain(window.points.iter().map(Range::len)).map(|extent| extent as i64);
            return Ok(Tensor::f_zeros(shape.collect::<Vec<_>>(), (Kind::Float, Device::Cpu))?);
        }
        let read = |(trajectory, frames): (usize, Range<usize>)| -> Result<Tensor> {
            let window = Window { frames, points: window.points.clone() };
            Ok(self.data.read(&window, &[trajectory], variables)?.f_transpose(0, 1)?)
        };
        cat(self.runs(samples).into_iter().map(read).collect::<Result<_>>()?, 0)
    }
}
