//! Prediction of a file's samples, one after the other, into a file like it.

use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use isobar_array::{Array, Convert, Elementwise};
use isobar_collectives::Group;
use isobar_data::{
    Batch, Content, Dataset, DatasetWriter, PredictionMeta, TimeAxis, Window, usual_step, writer,
};
use isobar_models::BatchPart;
use isobar_train::metric::Scoreboard;
use isobar_train::{BoxError, FieldLayout, FieldModel, Forward, Roles, Sample, Start};
use tch::{Device, Kind, Tensor};

use super::outcome::Outcome;
use super::output::Output;
use super::windows::Windows;
use crate::run::picture::Shown;
use crate::run::{Scoring, Source, as_str, scoring};
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
    /// True if NaN marks missing values, also in the predictions.
    pub(super) masked: bool,
}

/// The parts of inputs and targets that this rank reads, all ranks, and the dtype and device of the parameters.
pub(super) struct Place<'a> {
    pub(super) window: &'a [Range<usize>],
    pub(super) target_window: &'a [Range<usize>],
    pub(super) world: &'a Group,
    pub(super) options: (Kind, Device),
}

/// Progress log of rank 0: number of predicted samples, at most once every ten seconds.
struct Progress {
    all: usize,
    shows: bool,
    last: Instant,
}

impl Progress {
    const PAUSE: Duration = Duration::from_secs(10);

    fn new(all: usize, world: &Group) -> Self {
        Self { all, shows: world.rank() == 0, last: Instant::now() }
    }

    fn predicted(&mut self, count: usize) {
        if self.shows && self.last.elapsed() >= Self::PAUSE {
            tracing::info!("predicted {count} of {} samples", self.all);
            self.last = Instant::now();
        }
    }
}

/// The file to write, and its attributes besides those of its schema.
type Out<'a> = (&'a Path, &'a [(&'static str, String)]);

impl Prediction<'_> {
    /// Predicts and writes trajectory by trajectory.
    pub(super) fn of_trajectories<L, F>(
        &self,
        model: &FieldModel<L, F>,
        place: &Place<'_>,
        out: Out<'_>,
        scoring: &Scoring,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let source = self.source;
        let frames = source.data.times().map_or(1, <[f64]>::len);
        if self.start + self.steps >= frames && time_step(&*source.data, &*source.parts.train.data).is_none()
        {
            bail!(Exit::Usage.because(format!(
                "the time step beyond the last frame of {} is unknown: it has one frame, and the training data {} have no time \
                 step in a convertible unit; give data with at least two frames",
                source.path(),
                source.parts.train.data.path().display()
            )));
        }
        let known = self.steps.min(frames - 1 - self.start);
        let past = model.roles.as_ref().map_or(0, |roles| roles.history - 1);
        let stored = source.names.stored();
        let (kind, device) = place.options;
        let windows = Windows::new(&model.layout, place.window, place.world)?;
        let mut output = self.output(out, &source.targets, &windows, place.world)?;
        let mut progress = Progress::new(self.samples.len(), place.world);
        let none = || vec![Vec::new(); self.steps];
        let board = Scoreboard::new(scoring.report.metrics(), known);
        let mut outcome = Outcome { first: None, errors: none(), persistence: none(), board };
        for (index, &trajectory) in self.samples.iter().enumerate() {
            // All ranks read their windows of the initial frame and of the frames to compare with.
            let window =
                Window { frames: self.start - past..self.start + known + 1, points: place.window.to_vec() };
            let frames = source.data.read(&window, &[trajectory], &as_str(&stored))?.f_select(0, 0)?;
            let frames = frames.f_to_device(device)?.f_to_kind(kind)?;
            let own = model.layout.own(&[0])?.len() as i64;
            let frame =
                |at: usize| -> Result<Tensor> { Ok(frames.f_narrow(0, at as i64, 1)?.f_narrow(0, 0, own)?) };
            let times: Vec<Vec<f64>> = self.times().iter().map(|time| vec![*time; own as usize]).collect();
            let (input, targets) = (frame(0)?, (1..=past + known).map(frame).collect::<Result<_>>()?);
            let batch = Batch { input, targets, times: Vec::new() };
            let Sample { start, last, targets } =
                boxed(Roles::arrange_forecast(model.roles.as_ref(), batch))?;
            let start = Start { times, steps: self.steps, part: self.part(index), ..start };
            let members = boxed(model.roll_out_members(start, 1))?;
            let single = |members: &L::Array| scoring::single(members, frames.dim());
            let predicted = members.iter().map(single).collect::<Result<Vec<_>>>()?;
            let array = |frame: &Tensor| -> Result<L::Array> { Ok(model.layout.array(frame, 1)?) };
            let (input, persistent) = (array(&last)?, array(&boxed(model.filled(&last))?)?);
            let truth: Vec<L::Array> = targets.iter().map(array).collect::<Result<_>>()?;
            for (at, ((prediction, target), local)) in predicted.iter().zip(&truth).zip(&targets).enumerate()
            {
                outcome.errors[at].extend(boxed(model.errors_of(prediction, target))?);
                outcome.persistence[at].extend(boxed(model.errors_of(&persistent, target))?);
                let truth = (target, local);
                scoring.add(&mut outcome.board, &model.layout, (at + 1, 1), &members[at], truth)?;
            }
            if index == 0 {
                outcome.first = Some(Shown::of(&input, &truth, &predicted)?);
            }
            for (at, fields) in std::iter::once(&input).chain(&predicted).enumerate() {
                let fields = boxed(gaps(model, fields, &input))?;
                output.put(&windows, (&model.layout, &fields), |writer, points, values| {
                    self.write(writer, (index, at), &source.targets, (points, values))
                })?;
            }
            output.check(place.world)?;
            progress.predicted(index + 1);
        }
        output.finish(place.world)?;
        Ok(outcome)
    }

    /// Returns the place of a sample among all, so that a denoiser draws other noise for each.
    fn part(&self, index: usize) -> Option<BatchPart> {
        Some(BatchPart { offset: index as i64, total: self.samples.len() as i64 })
    }

    /// Predicts the outputs of samples without time, and writes them, with their inputs if these are of the same data set.
    pub(super) fn of_pairs<L, F>(
        &self,
        model: &FieldModel<L, F>,
        place: &Place<'_>,
        out: Out<'_>,
        scoring: &Scoring,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let source = self.source;
        let inputs = if source.has_own_targets() { &[] } else { &source.inputs[..] };
        let both = [inputs, &source.targets[..]].concat();
        let (kind, device) = place.options;
        let layout = model.layout.targets();
        let windows = Windows::new(layout, place.target_window, place.world)?;
        let mut output = self.output(out, &both, &windows, place.world)?;
        let mut progress = Progress::new(self.samples.len(), place.world);
        let board = Scoreboard::new(scoring.report.metrics(), 1);
        let mut outcome = Outcome { errors: vec![Vec::new()], first: None, persistence: Vec::new(), board };
        for (index, &sample) in self.samples.iter().enumerate() {
            let own = &[sample][..model.layout.own(&[0])?.len()];
            let read = |data: &dyn Dataset, window: &[Range<usize>], names: &[String]| -> Result<Tensor> {
                let fields = data.read(&Window::still(window), own, &as_str(names))?;
                Ok(fields.f_select(1, 0)?.f_to_device(device)?.f_to_kind(kind)?)
            };
            let from = read(&*source.data, place.window, &source.inputs)?;
            let to = read(&**source.targets(), place.target_window, &source.targets)?;
            let start = Start { part: self.part(index), ..Start::of_frame(&from, 1, &[]) };
            let members = boxed(model.roll_out_members(start, 1))?;
            let single = |members: &L::Array| scoring::single(members, from.dim());
            let predicted = members.iter().map(single).collect::<Result<Vec<_>>>()?;
            let (input, target) = (model.layout.array(&from, 1)?, layout.array(&to, 1)?);
            outcome.errors[0].extend(boxed(model.errors_of(&predicted[0], &target))?);
            scoring.add(&mut outcome.board, layout, (1, 1), &members[0], (&target, &to))?;
            if index == 0 {
                outcome.first = Some(Shown::of(&input, &[target], &predicted)?);
            }
            for (names, fields) in [(inputs, &input), (&source.targets, &predicted[0])] {
                if names.is_empty() {
                    continue;
                }
                output.put(&windows, (layout, fields), |writer, points, values| {
                    self.write(writer, (index, 0), names, (points, values))
                })?;
            }
            output.check(place.world)?;
            progress.predicted(index + 1);
        }
        output.finish(place.world)?;
        Ok(outcome)
    }

    /// A file like the data set that was read; of trajectories, of the frames from the first one on. All ranks call.
    fn output(
        &self,
        (path, attributes): (&Path, &[(&'static str, String)]),
        variables: &[String],
        windows: &Windows<'_>,
        world: &Group,
    ) -> Result<Output> {
        let mut names: Vec<String> = Vec::new();
        variables.iter().for_each(|name| {
            if !names.contains(name) {
                names.push(name.clone());
            }
        });
        let meta = PredictionMeta {
            name: self.name.clone(),
            variables: names,
            samples: self.samples.len(),
            times: self.times(),
            sample_times: self.sample_times(),
            sample_numbers: self.samples.to_vec(),
            attributes: attributes.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect(),
            missing: self.masked,
            left_out: Vec::new(),
        };
        // An extension of another format than HDF5 names it.
        let data = self.source.targets();
        let is_hdf5 = path.extension().is_none_or(|extension| {
            ["h5", "hdf5", "he5", "hdf"].iter().any(|own| extension.eq_ignore_ascii_case(own))
        });
        let other = if is_hdf5 { None } else { Some(writer(None, path)?) };
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
    /// [`of_trajectories`](Self::of_trajectories) has checked is known.
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
    fn write(
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
            let written = match writer.takes_windows() {
                true => writer.write_window(&variable.name, sample, at, points, &values),
                false => writer.write(&variable.name, sample, at, &values),
            };
            let number = self.samples.get(sample).copied().unwrap_or(sample);
            let place = match self.source.has_steps() {
                true => format!("step {at} of trajectory {number}"),
                false => format!("sample {number}"),
            };
            written.map_err(|error| not_finite(&place, &variable.name, error))?;
            first += channels;
        }
        Ok(())
    }
}

/// Says of values that a file rejects because they are not finite that they are a forecast, and where.
fn not_finite(place: &str, variable: &str, error: isobar_data::Error) -> anyhow::Error {
    let isobar_data::Error::NotFinite { value, .. } = error else { return error.into() };
    let text = format!(
        "the forecast of `{variable}` is not finite at {place}: {value}; predict fewer steps (--steps), or train further"
    );
    Exit::Data.because(text).into()
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

/// Fields with NaN where what they were predicted from is missing, if missing values are masked. Diagnostic variables are not
/// predicted from themselves.
fn gaps<L, F>(model: &FieldModel<L, F>, fields: &L::Array, from: &L::Array) -> Result<L::Array, BoxError>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    if model.missing.is_none() {
        return Ok(fields.shallow_clone());
    }
    let prognostic = model.roles.as_ref().map(|roles| roles.prognostic as i64);
    let present = model.layout.map(from, |local| {
        let present = local.f_isnan()?.f_logical_not()?;
        let channels = present.size()[1];
        Ok(match prognostic.filter(|prognostic| *prognostic < channels) {
            None => present,
            Some(prognostic) => {
                let others = present.f_narrow(1, prognostic, channels - prognostic)?.f_ones_like()?;
                Tensor::f_cat(&[present.f_narrow(1, 0, prognostic)?, others], 1)?
            }
        })
    })?;
    let none = fields.constant(&Tensor::from(f64::NAN).f_to_kind(fields.kind())?)?;
    Ok(present.select_where(fields, &none)?)
}

fn boxed<T>(result: Result<T, BoxError>) -> Result<T> {
    result.map_err(anyhow::Error::from_boxed)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use isobar_data::{DataVariable, Dim, Result, TimeUnit};

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
    fn values_that_are_not_finite_are_of_the_forecast() {
        let path = || Path::new("prediction.h5").to_owned();
        let error = isobar_data::Error::NotFinite {
            path: path(),
            dataset: "u".to_owned(),
            index: vec![0, 7, 1, 1],
            value: f64::INFINITY,
        };
        assert_eq!(
            not_finite("step 7 of trajectory 3", "u", error).to_string(),
            "the forecast of `u` is not finite at step 7 of trajectory 3: inf; predict fewer steps (--steps), or train further"
        );
        let other = not_finite("sample 3", "u", isobar_data::Error::Missing { path: path() }).to_string();
        assert_eq!(other, "prediction.h5: no such file");
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
