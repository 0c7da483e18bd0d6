//! The samples and steps to predict, and the file that holds them.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_data::{Content, Dataset, DatasetWriter, PredictionMeta, TimeAxis, usual_step, writer};
use isobar_train::Variable;
use tch::Tensor;

use super::divergence::Divergence;
use super::output::Output;
use super::samples;
use super::windows::Windows;
use crate::run::Source;
use crate::run::picture::Legend;
use isobar_command::exit::{Because, Exit};
use isobar_command::outputs;

/// Samples to predict: steps from a frame of some trajectories on, or outputs of samples without time.
pub(super) struct Prediction<'a> {
    pub(super) source: &'a Source,
    pub(super) samples: &'a [usize],
    pub(super) start: usize,
    pub(super) steps: usize,
    /// Name of the predicted data set.
    pub(super) name: String,
    /// Of the picture.
    pub(super) legend: Legend,
}

/// Output file of a prediction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Out<'a> {
    pub(super) path: &'a Path,
    /// Attributes besides those of the file's schema.
    pub(super) attributes: &'a [(&'static str, String)],
    /// True to write HDF5 without the schema of the data, which may not allow NaN.
    pub(super) plain: bool,
}

impl Out<'_> {
    /// Returns whether the file is HDF5, in the layout of the data or plain; extensions name other formats.
    pub(super) fn is_hdf5(&self) -> bool {
        self.path.extension().is_none_or(|extension| {
            ["h5", "hdf5", "he5", "hdf"].iter().any(|own| extension.eq_ignore_ascii_case(own))
        })
    }
}

impl Prediction<'_> {
    /// Names the samples that diverge, with step and variable; `None` if there are none.
    pub(super) fn diverged(&self, divergence: &Divergence, variables: &[Variable]) -> Option<String> {
        divergence.text(self.samples.len(), self.source.has_steps(), variables)
    }

    /// Number of steps whose truth is known.
    pub(super) fn known(&self) -> usize {
        let frames = self.source.data.times().map_or(1, <[f64]>::len);
        self.steps.min(frames.saturating_sub(self.start + 1))
    }

    /// Returns the line about samples and steps.
    pub(super) fn line(&self) -> String {
        let (numbers, Self { start, steps, .. }) = (samples::text(self.samples), self);
        match self.source.has_steps() {
            true => format!("samples     trajectories {numbers}, {steps} steps from frame {start}"),
            false => format!("samples     {numbers}"),
        }
    }

    /// Attributes of the file about the prediction and the data that it is from. Title and source are its own; a line is added to the
    /// history of the data.
    pub(super) fn attributes(&self) -> Vec<(&'static str, String)> {
        let source = self.source;
        let mut attributes = vec![
            ("title", self.name.clone()),
            ("source", "prediction by a neural network".to_owned()),
            ("history", format!("isobar {} predict", env!("CARGO_PKG_VERSION"))),
            ("isobar_data", source.path().to_string()),
        ];
        if source.has_own_targets() {
            attributes.push(("isobar_target_data", source.targets().path().display().to_string()));
        }
        attributes.push(("isobar_samples", samples::text(self.samples)));
        if source.has_steps() {
            attributes.push(("isobar_start_frame", self.start.to_string()));
            attributes.push(("isobar_steps", self.steps.to_string()));
        }
        attributes
    }

    /// Rejects steps beyond the last frame if the time of a step is not known.
    pub(super) fn check_times(&self) -> Result<()> {
        let (source, training) = (self.source, &self.source.parts.train.data);
        let beyond = source.has_steps() && self.known() < self.steps;
        if beyond && time_step(&*source.data, &**training).is_none() {
            bail!(Exit::Usage.because(format!(
                "the time step beyond the last frame of {} is unknown: it has one frame, and the training data {} have no time \
                 step in a convertible unit; give data with at least two frames",
                source.path(),
                training.path().display()
            )));
        }
        Ok(())
    }

    /// Variables of the inputs that are written: of samples without time those of the same data set as the targets.
    pub(super) fn written_inputs(&self) -> &[String] {
        match self.source.has_steps() || self.source.has_own_targets() {
            true => &[],
            false => &self.source.inputs,
        }
    }

    /// A file like the data set that was read; of trajectories, of the frames from the first one on. All ranks call.
    pub(super) fn output(&self, out: Out<'_>, windows: &Windows<'_>, world: &Group) -> Result<Output> {
        let mut names: Vec<String> = Vec::new();
        self.written_inputs().iter().chain(&self.source.targets).for_each(|name| {
            if !names.contains(name) {
                names.push(name.clone());
            }
        });
        let Out { path, attributes, plain } = out;
        let meta = PredictionMeta {
            name: self.name.clone(),
            variables: names,
            samples: self.samples.len(),
            times: self.times(),
            sample_times: self.sample_times(),
            sample_numbers: self.samples.to_vec(),
            attributes: attributes.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect(),
            // A forecast that diverges has NaN from that step on.
            missing: true,
            left_out: Vec::new(),
        };
        let data = self.source.targets();
        let other = match (out.is_hdf5(), plain) {
            (true, false) => None,
            (true, true) => Some(writer(Some("hdf5"), path)?),
            (false, _) => Some(writer(None, path)?),
        };
        let content = || -> Result<Content> {
            let mut content = data.content(&meta)?;
            if other.is_some_and(|writer| writer.by_rank()) {
                // Chunks as large as windows, so that a rank writes few that others have a part of.
                let dims = content.dims.iter().map(|dim| dim.name.clone());
                let channels = content.variables.iter().map(|variable| variable.channels.len()).max();
                content.storage.chunks = dims.zip(windows.chunk(channels.unwrap_or(1))).collect();
            }
            Ok(content)
        };
        let create = || -> Result<_> {
            outputs::make_parent(path)?;
            Ok(Some(match other {
                Some(writer) => writer.create(path, &content()?)?,
                None => data.create(path, &meta)?,
            }))
        };
        let join = |unfinished: &Path| -> Result<_> {
            let Some(writer) = other else { return Ok(data.create(path, &meta)?) };
            Ok(writer.join(path, &content()?, unfinished)?)
        };
        Output::open(world, create, join)
    }

    /// Times of the frame to start from and of each step; those beyond the data are a usual step apart, which
    /// [`check_times`](Self::check_times) has checked is known.
    pub(super) fn times(&self) -> Vec<f64> {
        let Some(times) = self.source.data.times() else { return Vec::new() };
        let interval = time_step(&*self.source.data, &*self.source.parts.train.data).unwrap_or(f64::NAN);
        let time = |frame: usize| match frame.saturating_sub(times.len() - 1) {
            0 => times[frame],
            beyond => times[times.len() - 1] + beyond as f64 * interval,
        };
        (self.start..=self.start + self.steps).map(time).collect()
    }

    /// Times of samples that have a time but no frames.
    fn sample_times(&self) -> Vec<f64> {
        let times = self.source.targets().sample_times().unwrap_or_default();
        self.samples.iter().filter_map(|&sample| times.get(sample).copied()).collect()
    }

    /// Writes a window of a frame, `[1, channel, spatial…]`, of a sample, a variable after the other.
    pub(super) fn write(
        &self,
        writer: &mut dyn DatasetWriter,
        (sample, at): (usize, usize),
        variables: &[String],
        (points, frame): (&[Range<usize>], &Tensor),
    ) -> Result<()> {
        let mut first = 0;
        for variable in self.source.chosen_targets(variables)? {
            let channels = variable.channels.len() as i64;
            let values = frame.f_narrow(1, first, channels)?;
            match writer.takes_windows() {
                true => writer.write_window(&variable.name, sample, at, points, &values)?,
                false => writer.write(&variable.name, sample, at, &values)?,
            }
            first += channels;
        }
        Ok(())
    }
}

/// Returns the usual step of the times of `data`; of a single frame, that of the training data in the unit of `data`. `None` if
/// neither has two frames, or a unit cannot be converted.
fn time_step(data: &dyn Dataset, training: &dyn Dataset) -> Option<f64> {
    let times = data.times()?;
    if let Some(step) = usual_step(times) {
        return Some(step);
    }
    let trained = training.times()?;
    let step = usual_step(trained)?;
    match (training.time_unit(), data.time_unit()) {
        (from, to) if from == to => Some(step),
        (Some(from), Some(to)) => {
            let (from, to) = (TimeAxis::new(from).ok()?, TimeAxis::new(to).ok()?);
            let first = *trained.first()?;
            Some(from.convert(first + step, &to)? - from.convert(first, &to)?)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use isobar_data::{DataVariable, Dim, Result, TimeUnit, Window};

    use super::*;

    /// A series of these times.
    #[derive(Debug)]
    struct Series(Vec<f64>, Option<TimeUnit>);

    impl Dataset for Series {
        fn path(&self) -> &Path {
            Path::new("series")
        }
        fn samples(&self) -> usize {
            1
        }
        fn dims(&self) -> &[Dim] {
            &[]
        }
        fn times(&self) -> Option<&[f64]> {
            Some(&self.0)
        }
        fn time_unit(&self) -> Option<&TimeUnit> {
            self.1.as_ref()
        }
        fn variables(&self) -> &[DataVariable] {
            &[]
        }
        fn read(&self, _: &Window, _: &[usize], _: &[&str]) -> Result<Tensor> {
            unreachable!()
        }
    }

    #[test]
    fn a_single_frame_is_stepped_like_the_training_data() {
        let series = |times: &[f64], unit: Option<&str>| {
            let unit = unit.map(|unit| TimeUnit { unit: unit.to_owned(), calendar: None });
            Series(times.to_vec(), unit)
        };
        let training = series(&[0.0, 6.0, 12.0], Some("hours since 1979-01-01"));
        let step = |data: &Series| time_step(data, &training);
        assert_eq!(step(&series(&[3.0, 4.0], None)), Some(1.0), "its own");
        assert_eq!(step(&series(&[3.0], Some("hours since 1979-01-01"))), Some(6.0));
        assert_eq!(step(&series(&[3.0], Some("days since 2020-01-01"))), Some(0.25));
        assert_eq!(step(&series(&[3.0], None)), None);
        assert_eq!(time_step(&training, &series(&[3.0], None)), Some(6.0));
    }
}
