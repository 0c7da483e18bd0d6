//! The data file of a run.

use std::f64::consts::TAU;
use std::ops::Range;

use anyhow::{Result, bail};
use isobar_data::{DataVariable, Dataset, choose};
use isobar_models::{Batch, FieldSpec};
use isobar_train::config::{AugmentConfig, DataConfig, Predict};
use isobar_train::{Variable, unique_names};
use tch::Tensor;

use crate::exit::{Because, Exit};

/// An open data set, and which of its variables a network maps to which.
pub(crate) struct Source {
    pub(crate) data: Box<dyn Dataset>,
    /// Names of the variables of the input.
    pub(crate) inputs: Vec<String>,
    /// Names of the variables of the output; of trajectories those of the input.
    pub(crate) targets: Vec<String>,
}

impl Source {
    /// Opens the data set that the configuration names.
    pub(crate) fn open(config: &DataConfig) -> Result<Self> {
        let data = config.open()?;
        let (inputs, targets) = match data.times() {
            Some(_) => steps(&*data, config)?,
            None => pair(&*data, config)?,
        };
        let source = Self { data, inputs, targets };
        let variables = source.chosen(&source.inputs)?.into_iter().chain(source.chosen(&source.targets)?);
        let has_direction = variables.into_iter().any(|variable| variable.has_direction);
        // A turned pair is a sample like any other; the equation of a trajectory may depend on the place.
        let has_places = config.positions && source.has_steps();
        if config.augment == AugmentConfig::Square && (has_places || has_direction) {
            bail!(Exit::Usage.because(
                "data.augment = \"square\" turns places, not the components of vectors or what says where points \
                 are; --set data.augment=none"
            ));
        }
        Ok(source)
    }

    /// Points along each spatial dim.
    pub(crate) fn extents(&self) -> Vec<usize> {
        self.data.dims().iter().map(|dim| dim.coordinates.len()).collect()
    }

    pub(crate) fn path(&self) -> std::path::Display<'_> {
        self.data.path().display()
    }

    /// Samples, or trajectories.
    pub(crate) fn samples(&self) -> usize {
        self.data.samples()
    }

    /// Returns whether the samples are trajectories, of which a network predicts the next frame.
    pub(crate) fn has_steps(&self) -> bool {
        self.data.times().is_some()
    }

    /// Variables by their names.
    pub(crate) fn chosen(&self, names: &[String]) -> Result<Vec<DataVariable>> {
        Ok(choose(&*self.data, &as_str(names))?)
    }

    /// Channels in and out.
    fn channels(&self) -> Result<[usize; 2]> {
        let count = |names: &[String]| -> Result<usize> {
            Ok(self.chosen(names)?.iter().map(|variable| variable.channels.len()).sum())
        };
        Ok([count(&self.inputs)?, count(&self.targets)?])
    }

    /// The variables that a network predicts: one for each channel of its output.
    pub(crate) fn variables(&self) -> Result<Vec<Variable>> {
        let channels = |variable: DataVariable| {
            let unit = variable.unit;
            variable.channels.into_iter().map(move |name| Variable { name, unit: unit.clone() })
        };
        Ok(unique_names(self.chosen(&self.targets)?.into_iter().flat_map(channels).collect()))
    }

    /// Titles of the first input and target in pictures.
    pub(crate) fn titles(&self) -> Result<[String; 2]> {
        let first =
            |names: &[String]| -> Result<String> { Ok(self.chosen(&names[..1])?[0].title().to_owned()) };
        Ok([first(&self.inputs)?, first(&self.targets)?])
    }

    /// Returns whether a spatial dim is periodic.
    fn is_periodic(&self, dim: usize) -> bool {
        self.data.dims()[dim].periodic
    }

    fn position_channels(&self) -> usize {
        (0..self.extents().len()).map(|dim| if self.is_periodic(dim) { 2 } else { 1 }).sum()
    }

    /// Returns the positions of a window's points, `[channel, spatial…]`: for each periodic dim the sine and cosine of the angle,
    /// for other dims a number from -1 to 1. In double precision.
    pub(crate) fn positions(&self, window: &[Range<usize>]) -> Result<Tensor> {
        let shape: Vec<i64> = window.iter().map(|part| part.len() as i64).collect();
        let mut channels = Vec::new();
        for (dim, (part, extent)) in window.iter().zip(self.extents()).enumerate() {
            let mut add = |place: &dyn Fn(f64) -> f64| -> Result<()> {
                let line: Vec<f64> = part.clone().map(|point| place(point as f64)).collect();
                let mut view = vec![1; shape.len()];
                view[dim] = shape[dim];
                channels.push(Tensor::f_from_slice(&line)?.f_view(&view[..])?.f_expand(&shape[..], false)?);
                Ok(())
            };
            let extent = extent as f64;
            if self.is_periodic(dim) {
                add(&|point| (TAU * point / extent).sin())?;
                add(&|point| (TAU * point / extent).cos())?;
            } else {
                add(&|point| 2.0 * point / (extent - 1.0).max(1.0) - 1.0)?;
            }
        }
        Ok(Tensor::f_stack(&channels, 0)?)
    }

    /// Shape of the samples: what a model's configuration is checked against.
    pub(crate) fn spec(&self, config: &DataConfig) -> Result<FieldSpec> {
        let [in_channels, out_channels] = self.channels()?;
        Ok(FieldSpec {
            source: self.path().to_string(),
            extents: self.extents(),
            in_channels,
            position_channels: if config.positions { self.position_channels() } else { 0 },
            out_channels,
            arrays: self.data.times().map(|_| Batch::<Tensor>::TIME.to_owned()).into_iter().collect(),
        })
    }

    /// Checks that the file has the samples and steps that a run trains on and validates, before anything is read.
    pub(crate) fn has_samples(&self, config: &DataConfig) -> Result<()> {
        let (path, samples) = (self.path(), self.samples());
        let frames = self.data.times().map(<[f64]>::len);
        let what = if frames.is_some() { "trajectories" } else { "samples" };
        if samples == 0 {
            bail!(Exit::Data.because(format!("{path} has no {what}")));
        }
        let validation = config.validation_samples;
        if validation >= samples {
            bail!(Exit::Usage.because(format!(
                "data.validation_samples is {validation}, but {path} has {samples} {what}, which leaves none for training; \
                 --set data.validation_samples={}",
                samples / 5
            )));
        }
        let most = samples - validation;
        if let Some(asked) = config.train_samples.filter(|asked| !(1..=most).contains(asked)) {
            bail!(Exit::Usage.because(format!(
                "data.train_samples is {asked}, expected 1 to {most}: {path} has {samples} {what}, of which {validation} are for \
                 validation; --set data.train_samples={most}"
            )));
        }
        let Some(frames) = frames else { return Ok(()) };
        if frames < 2 {
            bail!(
                Exit::Data
                    .because(format!("trajectories of {path} have {frames} frames, expected 2 or more"))
            );
        }
        for (key, steps) in
            [("train_steps", config.train_steps), ("validation_steps", config.validation_steps)]
        {
            let most = frames.saturating_sub(1);
            if !(1..=most).contains(&steps) {
                bail!(Exit::Usage.because(format!(
                    "data.{key} is {steps}, expected 1 to {most}: trajectories of {path} have {frames} frames; \
                     --set data.{key}={}",
                    steps.clamp(1, most.max(1))
                )));
            }
        }
        Ok(())
    }
}

/// Names as `data` takes them.
pub(crate) fn as_str(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

/// Lists the variables that `key` may name, with a setting that works.
fn known(data: &dyn Dataset, key: &str) -> String {
    let names: Vec<&str> = data.variables().iter().map(|variable| variable.name.as_str()).collect();
    format!("{} has {names:?}; --set 'data.{key}={names:?}'", data.path().display())
}

/// Rejects a list that names a variable twice.
fn check_unique(key: &str, what: &str, names: &[String]) -> Result<()> {
    let mut unique: Vec<&str> = Vec::new();
    for name in as_str(names) {
        if !unique.contains(&name) {
            unique.push(name);
        }
    }
    if unique.len() < names.len() {
        bail!(
            Exit::Usage.because(format!(
                "data.{key} names a {what} twice: {names:?}; --set 'data.{key}={unique:?}'"
            ))
        );
    }
    Ok(())
}

/// The variables that a network maps from frame to frame.
fn steps(data: &dyn Dataset, config: &DataConfig) -> Result<(Vec<String>, Vec<String>)> {
    for (key, names) in [("inputs", &config.inputs), ("targets", &config.targets)] {
        if !names.is_empty() {
            bail!(Exit::Usage.because(format!(
                "data.{key} is for samples without time, but {} holds trajectories; name the variables that are mapped from \
                 frame to frame in data.fields: --set 'data.{key}=[]' --set 'data.fields={names:?}'",
                data.path().display()
            )));
        }
    }
    if config.fields.is_empty() {
        bail!(Exit::Usage.because(format!("data.fields names no field; {}", known(data, "fields"))));
    }
    check_unique("fields", "field", &config.fields)?;
    Ok((config.fields.clone(), config.fields.clone()))
}

/// The variables that a network maps from and to.
fn pair(data: &dyn Dataset, config: &DataConfig) -> Result<(Vec<String>, Vec<String>)> {
    if (config.train_steps, config.validation_steps, config.predict) != (1, 1, Predict::Frame) {
        bail!(Exit::Usage.because(format!(
            "data.train_steps is {} and data.validation_steps {}, but samples of {} have no steps; --set data.train_steps=1 \
             --set data.validation_steps=1 --set data.predict=frame",
            config.train_steps,
            config.validation_steps,
            data.path().display()
        )));
    }
    let names_pairs = !config.inputs.is_empty() || !config.targets.is_empty();
    if names_pairs && !config.fields.is_empty() {
        bail!(Exit::Usage.because(format!(
            "data.fields is for trajectories, but samples of {} have no times and data.inputs and data.targets name what is \
             mapped; --set 'data.fields=[]'",
            data.path().display()
        )));
    }
    let default = data.default_pair().map(|pair| pair.map(|name| vec![name.to_owned()]));
    let [from, to] = default.unwrap_or_default();
    let or = |own: &[String], default: Vec<String>| if own.is_empty() { default } else { own.to_vec() };
    let (inputs, targets) = (or(&config.inputs, from), or(&config.targets, to));
    for (key, names) in [("inputs", &inputs), ("targets", &targets)] {
        if names.is_empty() {
            bail!(Exit::Usage.because(format!("data.{key} names no variable; {}", known(data, key))));
        }
        check_unique(key, "variable", names)?;
    }
    Ok((inputs, targets))
}
