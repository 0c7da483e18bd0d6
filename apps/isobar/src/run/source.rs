//! The data file of a run.

use std::f64::consts::TAU;
use std::ops::Range;

use anyhow::{Result, bail};
use isobar_data::{DarcyFile, WellFile};
use isobar_models::{Batch, FieldSpec};
use isobar_train::config::{AugmentConfig, DataConfig, DataFormat, Predict};
use isobar_train::{Variable, unique_names};
use tch::Tensor;

use crate::exit::{Because, Exit};

/// An open data file.
pub(crate) enum Source {
    Darcy(DarcyFile),
    Well { file: WellFile, fields: Vec<String> },
}

impl Source {
    /// Opens the file that the configuration names.
    pub(crate) fn open(config: &DataConfig) -> Result<Self> {
        Ok(match config.format {
            DataFormat::Darcy => {
                if (config.train_steps, config.validation_steps, config.predict) != (1, 1, Predict::Frame) {
                    bail!(Exit::Usage.because(format!(
                        "data.train_steps is {} and data.validation_steps {}, but Darcy flow has no steps; --set data.train_steps=1 \
                         --set data.validation_steps=1 --set data.predict=frame",
                        config.train_steps, config.validation_steps
                    )));
                }
                Self::Darcy(DarcyFile::open(&config.path)?)
            }
            DataFormat::TheWell => {
                let file = WellFile::open(&config.path)?;
                if config.fields.is_empty() {
                    let there: Vec<&str> = file.fields().iter().map(|field| field.name()).collect();
                    bail!(Exit::Usage.because(format!(
                        "data.fields names no field; {} has {there:?}; --set 'data.fields={there:?}'",
                        file.path().display()
                    )));
                }
                let mut names: Vec<&str> = Vec::new();
                for name in &config.fields {
                    if !names.contains(&name.as_str()) {
                        names.push(name);
                    }
                }
                if names.len() < config.fields.len() {
                    bail!(Exit::Usage.because(format!(
                        "data.fields names a field twice: {:?}; --set 'data.fields={names:?}'",
                        config.fields
                    )));
                }
                if config.augment == AugmentConfig::Square {
                    let has_direction = |name: &String| file.field(name).is_ok_and(|field| field.order() > 0);
                    if config.positions || config.fields.iter().any(has_direction) {
                        bail!(Exit::Usage.because(
                            "data.augment = \"square\" turns places, not the components of vectors or what says where points \
                             are; --set data.augment=none"
                        ));
                    }
                }
                Self::Well { file, fields: config.fields.clone() }
            }
        })
    }

    /// Points along each spatial dim.
    pub(crate) fn extents(&self) -> Vec<usize> {
        match self {
            Self::Darcy(file) => vec![file.rows(), file.cols()],
            Self::Well { file, .. } => file.grid().to_vec(),
        }
    }

    pub(crate) fn path(&self) -> std::path::Display<'_> {
        match self {
            Self::Darcy(file) => file.path().display(),
            Self::Well { file, .. } => file.path().display(),
        }
    }

    /// Samples, or trajectories.
    pub(crate) fn samples(&self) -> usize {
        match self {
            Self::Darcy(file) => file.len(),
            Self::Well { file, .. } => file.trajectories(),
        }
    }

    /// Channels in and out.
    fn channels(&self) -> Result<[usize; 2]> {
        match self {
            Self::Darcy(_) => Ok([1, 1]),
            Self::Well { file, fields } => {
                let mut channels = 0;
                for name in fields {
                    channels += file.field(name)?.components();
                }
                Ok([channels; 2])
            }
        }
    }

    /// The variables that a network predicts: one for each channel of its output.
    pub(crate) fn variables(&self) -> Result<Vec<Variable>> {
        match self {
            Self::Darcy(_) => Ok(vec![Variable::new("u")]),
            Self::Well { file, fields } => {
                let names: Vec<&str> = fields.iter().map(String::as_str).collect();
                let channels = file.channels(&names)?.into_iter();
                Ok(unique_names(channels.map(|(name, unit)| Variable { name, unit }).collect()))
            }
        }
    }

    /// Whether the ends of a spatial dim meet.
    fn is_periodic(&self, dim: usize) -> bool {
        match self {
            Self::Darcy(_) => false,
            Self::Well { file, .. } => file.is_periodic(dim),
        }
    }

    fn position_channels(&self) -> usize {
        (0..self.extents().len()).map(|dim| if self.is_periodic(dim) { 2 } else { 1 }).sum()
    }

    /// Where the points of a window are, `[channel, spatial…]`: for each dim the sine and cosine of the way round where its ends
    /// meet, else a number from -1 to 1. In double precision.
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
            arrays: match self {
                Self::Darcy(_) => Vec::new(),
                Self::Well { .. } => vec![Batch::<Tensor>::TIME.to_owned()],
            },
        })
    }

    /// Checks that the file has the samples and steps that a run trains on and validates, before anything is read.
    pub(crate) fn has_samples(&self, config: &DataConfig) -> Result<()> {
        let (path, samples) = (self.path(), self.samples());
        let (what, frames) = match self {
            Self::Darcy(_) => ("samples", None),
            Self::Well { file, .. } => ("trajectories", Some(file.frames())),
        };
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
