//! Prediction of a file's samples, one after the other, into a file like it.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, bail};
use isobar_data::{DarcyFields, DarcyFile, DarcyWriter, WellFile, WellWriter};
use isobar_shard::Parallel;
use isobar_torch::memory::to_vec;
use isobar_train::loss::variable_errors;
use isobar_train::{BoxError, FieldLayout, FieldModel, Forward};
use tch::{Device, Kind, Tensor};

use super::outcome::Outcome;
use crate::exit::{Because, Exit};
use crate::run::picture::Shown;

/// Steps from a frame of some trajectories on.
pub(super) struct Rollout<'a> {
    pub(super) file: &'a WellFile,
    pub(super) names: &'a [&'a str],
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

impl Rollout<'_> {
    /// Predicts and writes trajectory by trajectory.
    pub(super) fn predict<L, F>(
        &self,
        model: &FieldModel<L, F>,
        place: &Place<'_>,
        out: Out<'_>,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let known = self.steps.min(self.file.frames() - 1 - self.start);
        let (kind, device) = place.options;
        let mut writer = out.map(|out| self.writer(out)).transpose()?;
        let none = || vec![Vec::new(); self.steps];
        let mut outcome = Outcome { first: None, errors: none(), persistence: none() };
        for (index, &trajectory) in self.samples.iter().enumerate() {
            // All ranks read their windows of the initial frame and of the frames to compare with.
            let frames =
                self.file.read(self.names, trajectory, self.start..self.start + known + 1, place.window)?;
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
                    self.write(writer, (index, at), &whole)?;
                }
            }
        }
        if let Some(writer) = writer {
            writer.finish()?;
        }
        Ok(outcome)
    }

    /// A file like the one that was read, of the frames from the first one on.
    fn writer(&self, (path, attributes): (&Path, &[(&'static str, String)])) -> Result<WellWriter> {
        let mut meta = self.file.meta();
        meta.name = self.name.clone();
        meta.trajectories = self.samples.len();
        meta.times = self.times();
        meta.fields.retain(|(field, _)| self.names.contains(&field.as_str()));
        meta.units.retain(|(field, _)| self.names.contains(&field.as_str()));
        make_folder(path)?;
        let writer = WellWriter::create(path, &meta)?;
        attributes.iter().try_for_each(|(name, text)| writer.attribute(name, text))?;
        Ok(writer)
    }

    /// Times of the frame to start from and of each step; those beyond the data are as far apart as the last two.
    pub(super) fn times(&self) -> Vec<f64> {
        let times = self.file.times();
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

    /// Writes a frame `[1, channel, spatial…]` of a trajectory, a field after the other.
    fn write(&self, writer: &mut WellWriter, (trajectory, at): (usize, usize), frame: &Tensor) -> Result<()> {
        let mut first = 0;
        for name in self.names {
            let components = self.file.field(name)?.components() as i64;
            writer.write(name, trajectory, at, &frame.f_narrow(1, first, components)?)?;
            first += components;
        }
        Ok(())
    }
}

/// Predicts the solutions of samples of Darcy flow, and writes them with their coefficients.
pub(super) fn darcy<L, F>(
    model: &FieldModel<L, F>,
    file: &DarcyFile,
    samples: &[usize],
    place: &Place<'_>,
    out: Out<'_>,
) -> Result<Outcome>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    let mut writer = None;
    if let Some((path, attributes)) = out {
        if file.rows() != file.cols() {
            bail!(Exit::Data.because(format!("{} is not of square fields", file.path().display())));
        }
        make_folder(path)?;
        let created = DarcyWriter::create(path, samples.len(), file.rows(), file.beta())?;
        attributes.iter().try_for_each(|(name, text)| created.attribute(name, text))?;
        writer = Some(created);
    }
    let mut outcome = Outcome { errors: vec![Vec::new()], ..Outcome::default() };
    for (index, &sample) in samples.iter().enumerate() {
        let own = &[sample][..model.layout.own(&[0])?.len()];
        let DarcyFields { nu, u } = file.read(own, place.window[0].clone(), place.window[1].clone())?;
        let there = |field: Tensor| field.f_to_device(place.options.1)?.f_to_kind(place.options.0);
        let (nu, u) = (there(nu)?, there(u)?);
        let predicted = boxed(model.roll_out(&nu, 1, 1))?;
        let (coefficient, target) = (model.layout.array(&nu, 1)?, model.layout.array(&u, 1)?);
        outcome.errors[0].extend(variable_errors(&predicted[0], &target)?);
        if index == 0 {
            outcome.first = Some(Shown::of(&coefficient, &[target], &predicted)?);
        }
        let (coefficient, solution) = (coefficient.whole()?, predicted[0].whole()?);
        if let Some(writer) = &mut writer {
            writer.append(&numbers(&coefficient)?, &numbers(&solution)?)?;
        }
    }
    if let Some(writer) = writer {
        writer.finish()?;
    }
    Ok(outcome)
}

fn numbers(field: &Tensor) -> Result<Vec<f32>> {
    Ok(to_vec(&field.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?)?)
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
