//! Prediction of a file's samples, one after the other, into a file like it.

use std::ops::Range;
use std::path::Path;

use anyhow::Result;
use isobar_array::Local;
use isobar_data::{DatasetWriter, PredictionMeta, Window};
use isobar_train::loss::variable_errors;
use isobar_train::{BoxError, FieldLayout, FieldModel, Forward};
use tch::{Device, Kind, Tensor};

use super::outcome::Outcome;
use crate::exit::{Because, Exit};
use crate::run::picture::Shown;
use crate::run::{Source, as_str};

/// Samples to predict: steps from a frame of some trajectories on, or outputs of samples without time.
pub(super) struct Prediction<'a> {
    pub(super) source: &'a Source,
    pub(super) samples: &'a [usize],
    pub(super) start: usize,
    pub(super) steps: usize,
    /// Name of the predicted data set.
    pub(super) name: String,
}

/// The part of the fields that this rank reads, and the dtype and device of the parameters.
pub(super) struct Place<'a> {
    pub(super) window: &'a [Range<usize>],
    pub(super) options: (Kind, Device),
}

/// The file to write, and its attributes besides those of its schema; on rank 0.
type Out<'a> = Option<(&'a Path, &'a [(&'static str, String)])>;

impl Prediction<'_> {
    /// Predicts and writes trajectory by trajectory.
    pub(super) fn of_trajectories<L, F>(
        &self,
        model: &FieldModel<L, F>,
        place: &Place<'_>,
        out: Out<'_>,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let source = self.source;
        let frames = source.data.times().map_or(1, <[f64]>::len);
        let known = self.steps.min(frames - 1 - self.start);
        let (kind, device) = place.options;
        let mut writer = out.map(|out| self.writer(out, &source.targets)).transpose()?;
        let none = || vec![Vec::new(); self.steps];
        let mut outcome = Outcome { first: None, errors: none(), persistence: none() };
        for (index, &trajectory) in self.samples.iter().enumerate() {
            // All ranks read their windows of the initial frame and of the frames to compare with.
            let window = Window { frames: self.start..self.start + known + 1, points: place.window.to_vec() };
            let frames = source.data.read(&window, &[trajectory], &as_str(&source.inputs))?.f_select(0, 0)?;
            let frames = frames.f_to_device(device)?.f_to_kind(kind)?;
            let own = model.layout.own(&[0])?.len() as i64;
            let frame =
                |at: usize| -> Result<Tensor> { Ok(frames.f_narrow(0, at as i64, 1)?.f_narrow(0, 0, own)?) };
            let times: Vec<Vec<f64>> = self.times().iter().map(|time| vec![*time; own as usize]).collect();
            let predicted = boxed(model.roll_out_at(&frame(0)?, 1, self.steps, &times))?;
            let array = |at: usize| -> Result<L::Array> { Ok(model.layout.array(&frame(at)?, 1)?) };
            let input = array(0)?;
            let truth: Vec<L::Array> = (1..=known).map(array).collect::<Result<_>>()?;
            for (at, (prediction, target)) in predicted.iter().zip(&truth).enumerate() {
                outcome.errors[at].extend(variable_errors(prediction, target)?);
                outcome.persistence[at].extend(variable_errors(&input, target)?);
            }
            if index == 0 {
                outcome.first = Some(Shown::of(&input, &truth, &predicted)?);
            }
            // Only one frame at a time is gathered in full.
            for (at, fields) in std::iter::once(&input).chain(&predicted).enumerate() {
                let whole = fields.whole()?;
                if let Some(writer) = &mut writer {
                    self.write(&mut **writer, (index, at), &source.targets, &whole)?;
                }
            }
        }
        if let Some(writer) = writer {
            writer.finish()?;
        }
        Ok(outcome)
    }

    /// Predicts the outputs of samples without time, and writes them with their inputs.
    pub(super) fn of_pairs<L, F>(
        &self,
        model: &FieldModel<L, F>,
        place: &Place<'_>,
        out: Out<'_>,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let source = self.source;
        let both = [&source.inputs[..], &source.targets[..]].concat();
        let mut writer = out.map(|out| self.writer(out, &both)).transpose()?;
        let (kind, device) = place.options;
        let mut outcome = Outcome { errors: vec![Vec::new()], ..Outcome::default() };
        for (index, &sample) in self.samples.iter().enumerate() {
            let own = &[sample][..model.layout.own(&[0])?.len()];
            let read = |names: &[String]| -> Result<Tensor> {
                let fields = source.data.read(&Window::still(place.window), own, &as_str(names))?;
                Ok(fields.f_select(1, 0)?.f_to_device(device)?.f_to_kind(kind)?)
            };
            let (from, to) = (read(&source.inputs)?, read(&source.targets)?);
            let predicted = boxed(model.roll_out(&from, 1, 1))?;
            let (input, target) = (model.layout.array(&from, 1)?, model.layout.array(&to, 1)?);
            outcome.errors[0].extend(variable_errors(&predicted[0], &target)?);
            if index == 0 {
                outcome.first = Some(Shown::of(&input, &[target], &predicted)?);
            }
            let (input, output) = (input.whole()?, predicted[0].whole()?);
            if let Some(writer) = &mut writer {
                self.write(&mut **writer, (index, 0), &source.inputs, &input)?;
                self.write(&mut **writer, (index, 0), &source.targets, &output)?;
            }
        }
        if let Some(writer) = writer {
            writer.finish()?;
        }
        Ok(outcome)
    }

    /// A file like the data set that was read; of trajectories, of the frames from the first one on.
    fn writer(
        &self,
        (path, attributes): (&Path, &[(&'static str, String)]),
        variables: &[String],
    ) -> Result<Box<dyn DatasetWriter>> {
        make_folder(path)?;
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
            attributes: attributes.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect(),
        };
        Ok(self.source.data.create(path, &meta)?)
    }

    /// Times of the frame to start from and of each step; those beyond the data are as far apart as the last two.
    pub(super) fn times(&self) -> Vec<f64> {
        let Some(times) = self.source.data.times() else { return Vec::new() };
        let interval = match times {
            [.., before, last] => last - before,
            _ => 1.0,
        };
        let time = |frame: usize| {
            let beyond = frame.saturating_sub(times.len() - 1) as f64;
            times[frame.min(times.len() - 1)] + beyond * interval
        };
        (self.start..=self.start + self.steps).map(time).collect()
    }

    /// Writes a frame `[1, channel, spatial…]` of a sample, a variable after the other.
    fn write(
        &self,
        writer: &mut dyn DatasetWriter,
        (sample, at): (usize, usize),
        variables: &[String],
        frame: &Tensor,
    ) -> Result<()> {
        let mut first = 0;
        for variable in self.source.chosen(variables)? {
            let channels = variable.channels.len() as i64;
            writer.write(&variable.name, sample, at, &frame.f_narrow(1, first, channels)?)?;
            first += channels;
        }
        Ok(())
    }
}

fn boxed<T>(result: Result<T, BoxError>) -> Result<T> {
    result.map_err(anyhow::Error::from_boxed)
}

fn make_folder(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    let made = std::fs::create_dir_all(folder);
    made.map_err(|error| {
        Exit::Data.because(format!("cannot make the folder {}: {error}", folder.display())).into()
    })
}
