//! The data file of a run.

use std::f64::consts::TAU;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use isobar_data::{Computed, DataVariable, Dataset, Normalizer, Part, Parts, choose};
use isobar_models::{Batch, FieldSpec};
use isobar_train::config::{AugmentConfig, DataConfig};
use isobar_train::{Variable, unique_names};
use tch::Tensor;

use super::picture::{self, Legend};
use super::roles::{Variables, as_str, channels};
use isobar_command::exit::{Because, Exit};

/// An open data set, and which of its variables a network maps to which.
pub(crate) struct Source {
    /// Data that are predicted: the test set, or else those that validation is on.
    pub(crate) data: Arc<dyn Dataset>,
    /// Training, validation and test samples.
    pub(crate) parts: Parts,
    /// Names of the variables of the input.
    pub(crate) inputs: Vec<String>,
    /// Names of the variables of the output; of trajectories those of the input, and diagnostic ones.
    pub(crate) targets: Vec<String>,
    /// Variables by their role.
    pub(crate) names: Variables,
}

/// Names the computed field that a missing forcing or static field may be meant to be.
fn with_computed(config: &DataConfig, error: isobar_data::Error) -> anyhow::Error {
    let meant = match &error {
        isobar_data::Error::MissingField { field, .. }
            if config.forcings.iter().chain(&config.statics).any(|name| name == field) =>
        {
            Computed::nearest(field)
        }
        _ => None,
    };
    match meant {
        Some(name) => {
            Exit::Data.because(format!("{error}; or did you mean the computed field `{name}`?")).into()
        }
        None => error.into(),
    }
}

impl Source {
    /// Opens the data set that the configuration names; times are in the unit that the model needs, if it names one.
    pub(crate) fn open(config: &DataConfig, time_unit: Option<&str>) -> Result<Self> {
        let parts = match time_unit {
            Some(unit) => config.parts_in_unit(unit),
            None => config.parts(),
        };
        let parts = parts.map_err(|error| with_computed(config, error))?;
        let data = Arc::clone(&parts.predicted().data);
        let names = Variables::new(&*data, &**parts.predicted().targets(), config)?;
        let source =
            Self { data, parts, inputs: names.inputs.clone(), targets: names.targets.clone(), names };
        // From metadata: coordinates and a calendar, where computed fields need them.
        let whole: Vec<Range<usize>> = source.extents().into_iter().map(|extent| 0..extent).collect();
        for computed in [&source.names.computed, &source.names.places] {
            let _ = Computed::new(computed, &*source.data, &whole)?;
        }
        let stored = [&source.names.inputs[..], &source.names.forcings].concat();
        let variables = [source.chosen(&stored)?, source.chosen_targets(&source.names.targets)?].concat();
        let has_direction = variables.into_iter().any(|variable| variable.has_direction);
        // A turned pair is a sample like any other; the equation of a trajectory may depend on the place.
        let computed = !source.names.computed.is_empty() || !config.statics.is_empty();
        let has_places = (config.positions && source.has_steps()) || computed;
        if config.augment == AugmentConfig::Square && (has_places || has_direction) {
            bail!(Exit::Usage.because(
                "data.augment = \"square\" turns places, not the components of vectors or what says where points \
                 are; --set data.augment=none"
            ));
        }
        Ok(source)
    }

    /// Points of the inputs along each spatial dim.
    pub(crate) fn extents(&self) -> Vec<usize> {
        extents(&*self.data)
    }

    /// The data set of the targets of [`Source::data`].
    pub(crate) fn targets(&self) -> &Arc<dyn Dataset> {
        self.parts.predicted().targets()
    }

    /// Sets the scales of inputs, targets and forcings, so that missing values can be replaced without reading the training samples.
    pub(crate) fn set_scales(
        &self,
        [input, target]: [&Normalizer; 2],
        forcing: Option<&Normalizer>,
    ) -> Result<()> {
        self.parts.set_scales(&as_str(&self.inputs), input)?;
        if let Some(forcing) = forcing {
            self.parts.set_scales(&as_str(&self.names.forcings), forcing)?;
        }
        Ok(self.parts.set_target_scales(&as_str(&self.targets), target)?)
    }

    /// Points of the targets along each spatial dim.
    pub(crate) fn target_extents(&self) -> Vec<usize> {
        extents(&**self.targets())
    }

    /// Returns whether the targets are a data set of their own.
    pub(crate) fn has_own_targets(&self) -> bool {
        self.parts.train.target.is_some()
    }

    pub(crate) fn path(&self) -> std::path::Display<'_> {
        self.data.path().display()
    }

    /// Variables of the output that are none of the input's: targets of samples without time, diagnostic ones of trajectories.
    pub(super) fn others(&self) -> &[String] {
        match self.has_steps() {
            true => self.targets.get(self.inputs.len()..).unwrap_or_default(),
            false => &self.targets,
        }
    }

    pub(super) fn has_others(&self) -> bool {
        !self.others().is_empty()
    }

    /// Samples, or trajectories.
    pub(crate) fn samples(&self) -> usize {
        self.data.samples()
    }

    /// Samples of single steps for training or validation, at most.
    pub(crate) fn most_samples(&self) -> usize {
        let count =
            |part: &Part| part.samples.len().saturating_mul(part.data.times().map_or(1, <[f64]>::len));
        count(&self.parts.train).max(count(&self.parts.validation))
    }

    /// Returns whether the samples are trajectories, of which a network predicts the next frame.
    pub(crate) fn has_steps(&self) -> bool {
        self.data.times().is_some()
    }

    /// Variables of the data set of the inputs by their names.
    pub(crate) fn chosen(&self, names: &[String]) -> Result<Vec<DataVariable>> {
        Ok(choose(&*self.data, &as_str(names))?)
    }

    /// Variables of the data set of the targets by their names.
    pub(crate) fn chosen_targets(&self, names: &[String]) -> Result<Vec<DataVariable>> {
        Ok(choose(&**self.targets(), &as_str(names))?)
    }

    /// The variables that a network predicts: one for each channel of its output.
    pub(crate) fn variables(&self) -> Result<Vec<Variable>> {
        let channels = |variable: DataVariable| {
            let DataVariable { name: whole, unit, channels, .. } = variable;
            let channel = move |name: String| {
                let part_of = (name != whole).then(|| whole.clone());
                Variable { name, unit: unit.clone(), part_of }
            };
            channels.into_iter().map(channel)
        };
        Ok(unique_names(self.chosen_targets(&self.names.targets)?.into_iter().flat_map(channels).collect()))
    }

    /// Returns the titles of pictures, those of the first channel of inputs and targets, and the channels of the coordinates `points` of a
    /// point cloud.
    pub(crate) fn legend(&self, points: Option<&str>) -> Result<Legend> {
        let first = |variables: Vec<DataVariable>| picture::title(&variables[0]).to_owned();
        let Variables { inputs, targets, .. } = &self.names;
        let titles = [first(self.chosen(&inputs[..1])?), first(self.chosen_targets(&targets[..1])?)];
        Ok(Legend { titles, points: points.map(|name| self.point_channels(name)).transpose()? })
    }

    /// The channels of the input variable `name`, the coordinates of a point cloud.
    fn point_channels(&self, name: &str) -> Result<Range<i64>> {
        let all = self.chosen(&self.names.inputs)?;
        let count = |variable: &DataVariable| variable.channels.len() as i64;
        let own = all.iter().position(|variable| variable.name == name);
        let is_cloud = self.extents().len() == 1 && self.target_extents() == self.extents();
        let own = own.filter(|_| is_cloud && !self.has_steps());
        let Some(own) = own else {
            bail!(Exit::Usage.because(format!(
                "data.points is {name:?}, expected one of data.inputs ({}), of samples without time on one dim of points; \
                 without it, pictures show the points in a row",
                self.names.inputs.join(", ")
            )));
        };
        let first = all[..own].iter().map(count).sum();
        match count(&all[own]) {
            coordinates @ 2..=3 => Ok(first..first + coordinates),
            other => bail!(Exit::Usage.because(format!(
                "data.points is {name:?}, which has {other} channels, expected 2 or 3: a coordinate each"
            ))),
        }
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
        let [in_channels, statics] = self.names.input_channels(&*self.data, config)?;
        let train = &self.parts.train;
        let mut source = train.data.path().display().to_string();
        if let Some(target) = &train.target {
            source += &format!(" and {}", target.path().display());
        }
        Ok(FieldSpec {
            source,
            extents: self.extents(),
            target_extents: Some(self.target_extents()).filter(|targets| *targets != self.extents()),
            in_channels,
            position_channels: statics + if config.positions { self.position_channels() } else { 0 },
            out_channels: channels(&**self.targets(), &self.names.targets)?,
            arrays: self.data.times().map(|_| Batch::<Tensor>::TIME.to_owned()).into_iter().collect(),
            ..FieldSpec::default()
        })
    }

    /// Checks that the data have the samples and steps that a run trains on and validates, before anything is read.
    pub(crate) fn has_samples(&self, config: &DataConfig) -> Result<()> {
        let Parts { train, validation, .. } = &self.parts;
        let (path, samples) = (train.data.path().display(), train.data.samples());
        let what = if self.has_steps() { "trajectories" } else { "samples" };
        if samples == 0 {
            bail!(Exit::Data.because(format!("{path} has no {what}")));
        }
        let is_separate = !Arc::ptr_eq(&train.data, &validation.data)
            && train.data.path() != validation.data.path()
            || config.validation_path.is_some()
            || config.validation_times.is_some();
        let kept = if is_separate { 0 } else { config.validation_samples };
        if kept >= samples {
            let times = match (self.has_steps(), samples) {
                (true, 1) => {
                    " (a single trajectory is split by times: set data.train_times and data.validation_times)"
                }
                _ => "",
            };
            bail!(Exit::Usage.because(format!(
                "data.validation_samples is {kept}, but {path} has {samples} {what}, which leaves none for training; \
                 --set data.validation_samples={}{times}",
                samples / 5
            )));
        }
        let most = samples - kept;
        if let Some(asked) = config.train_samples.filter(|asked| !(1..=most).contains(asked)) {
            bail!(Exit::Usage.because(format!(
                "data.train_samples is {asked}, expected 1 to {most}: {path} has {samples} {what}, of which {kept} are for \
                 validation; --set data.train_samples={most}"
            )));
        }
        if self.has_steps() {
            let steps = ("train_steps", config.train_steps.most());
            has_frames(train, config, steps, ("train_times", config.train_times.is_some()))?;
            let steps = ("validation_steps", config.validation_steps);
            has_frames(validation, config, steps, ("validation_times", config.validation_times.is_some()))?;
        }
        Ok(())
    }
}

/// Points along each spatial dim.
fn extents(data: &dyn Dataset) -> Vec<usize> {
    data.dims().iter().map(|dim| dim.coordinates.len()).collect()
}

/// Checks that trajectories have the frames of some steps and of the history before them. `times` is the key that chooses the frames,
/// and true if it is set.
fn has_frames(
    part: &Part,
    config: &DataConfig,
    (key, steps): (&str, usize),
    times: (&str, bool),
) -> Result<()> {
    let (path, frames) = (part.data.path().display(), part.data.times().map_or(0, <[f64]>::len));
    let history = config.history;
    if frames < 2 || (times.1 && frames <= history) {
        let least = history.saturating_add(1);
        let (times, is_set) = times;
        let times = if is_set { times } else { "times" };
        match is_set || config.times.is_some() {
            true => bail!(Exit::Usage.because(format!(
                "data.{times} leaves {frames} frames of {path}, expected {least} or more, as data.history is {history}; \
                 --set 'data.{times}=[FIRST, LAST]' with a longer interval"
            ))),
            false => bail!(Exit::Data.because(format!(
                "trajectories of {path} have {frames} frames, expected {least} or more; choose data with longer trajectories"
            ))),
        }
    }
    let most = frames - 1;
    if history > most {
        bail!(Exit::Usage.because(format!(
            "data.history is {history}, expected 1 to {most}: trajectories of {path} have {frames} frames; --set \
             data.history={most}"
        )));
    }
    let most = frames - history;
    if !(1..=most).contains(&steps) {
        bail!(Exit::Usage.because(format!(
            "data.{key} is {steps}, expected 1 to {most}: trajectories of {path} have {frames} frames; --set data.{key}={}",
            steps.clamp(1, most)
        )));
    }
    Ok(())
}
