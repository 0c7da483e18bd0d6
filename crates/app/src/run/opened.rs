//! The data of a run, and whether its model fits them.

use anyhow::Result;
use isobar_data::{Part, Parts, missing_frames, usual_step};
use isobar_manager::DeviceMesh;
use isobar_models::{Batch, FieldSpec};
use isobar_train::config::DataConfig;
use isobar_train::{Conditions, idle_ranks};

use super::check_model;
use super::first_stage::FirstStage;
use super::source::Source;
use crate::config::Config;

/// The data of a run, which fit its model.
pub(super) struct Opened {
    pub(super) source: Source,
    /// The fields that the model is given.
    pub(super) fields: FieldSpec,
    pub(super) conditions: Option<Conditions>,
}

impl Opened {
    /// Opens the data of a configuration, and compares its model, task and first stage with them. Does not communicate.
    pub(super) fn new(config: &Config, first_stage: Option<&FirstStage>, trains: bool) -> Result<Self> {
        let source = Source::open(&config.data, config.model.time_unit())?;
        if trains {
            source.has_samples(&config.data)?;
        }
        let mut fields = source.spec(&config.data)?;
        let conditions = source.names.conditions(&*source.data, &config.data, &fields)?;
        if let Some(conditions) = &conditions {
            fields.in_channels -= conditions.count;
        }
        let given = given(&fields, conditions.is_some());
        first_stage.into_iter().try_for_each(|stage| stage.check(&given))?;
        config.check_fields(&fields, conditions.is_some())?;
        let given = given.map(|fields| config.fields_of_model(fields));
        check_model(&config.model, &given)?;
        let [fields, _] = given;
        Ok(Self { source, fields, conditions })
    }

    /// Warns of data and of a mesh that work, but perhaps not as meant. One rank calls.
    pub(super) fn warn(&self, config: &Config, mesh: Option<&DeviceMesh>, trains: bool) {
        warn_of_gaps(&self.source, trains);
        warn_of_steps(&self.source, trains);
        if !trains {
            return;
        }
        warn_of_shared_files(&self.source, &config.data);
        if let Some(mesh) = mesh {
            let warnings = idle_ranks(mesh, config.model.sharding().grid(), "tokens");
            warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        }
    }
}

/// The fields as a model is given them, and the same without conditions of samples.
fn given(fields: &FieldSpec, has_conditions: bool) -> [FieldSpec; 2] {
    let mut given = fields.clone();
    if has_conditions {
        given.arrays.extend([Batch::<()>::CONDITIONS, Batch::<()>::CLASS_LABELS].map(str::to_owned));
    }
    [given, fields.clone()]
}

/// Warns of validation files that training reads, too.
fn warn_of_shared_files(source: &Source, config: &DataConfig) {
    let cuts = [&config.train_times, &config.validation_times].into_iter().any(Option::is_some);
    if config.validation_path.is_none() || cuts {
        return;
    }
    let Parts { train, validation, .. } = &source.parts;
    let train = train.data.files();
    if let Some(shared) = validation.data.files().into_iter().find(|file| train.contains(file)) {
        tracing::warn!("{} is in data.path and in data.validation_path", shared.display());
    }
}

/// Warns of data with another time step than that of the training samples.
fn warn_of_steps(source: &Source, trains: bool) {
    let Parts { train, validation, test, .. } = &source.parts;
    let other =
        if trains { Some((validation, "validation")) } else { test.as_ref().map(|test| (test, "test")) };
    let steps = |part: &Part| usual_step(part.data.times()?);
    if let Some((part, name)) = other
        && let (Some(own), Some(known)) = (steps(part), steps(train))
        && (own - known).abs() > 0.01 * known.abs()
    {
        tracing::warn!(
            "the time step of the {name} data {} is {own}, that of the training data {known}; the network predicts steps of {known}",
            part.data.path().display()
        );
    }
}

/// Warns of frames that are missing in the data that are used.
fn warn_of_gaps(source: &Source, trains: bool) {
    let Parts { train, validation, test, .. } = &source.parts;
    let (train, validation) = ((train, "train"), (validation, "validation"));
    let used = match (trains, test) {
        (true, _) => vec![train, validation],
        (false, Some(test)) => vec![(test, "test")],
        (false, None) => vec![validation],
    };
    let mut known: Vec<String> = Vec::new();
    for (part, name) in used {
        let Some(found) = missing_frames(&*part.data).filter(|found| !known.contains(found)) else {
            continue;
        };
        tracing::warn!("{found}; a step spans the gap; select a range of times with data.{name}_times");
        known.push(found);
    }
}

#[cfg(test)]
mod tests {
    use isobar_models::{DitConfig, EdmPreconditionerConfig, ModelConfig, PerDim};
    use isobar_train::DiffusionConfig;
    use isobar_train::objective::ObjectiveKind;
    use rstest::rstest;

    use super::*;

    /// Samples of one field, with or without scalars as conditions; a denoiser's input has the channel of the targets, too.
    #[rstest]
    fn conditions_that_no_model_reads_are_refused(
        #[values(false, true)] denoises: bool,
        #[values(false, true)] has_conditions: bool,
        #[values(None, Some(2))] condition_dim: Option<usize>,
    ) {
        let dit = ModelConfig::new(DitConfig {
            patch_size: PerDim::All(2),
            out_channels: Some(1),
            hidden_size: 8,
            depth: 1,
            num_heads: 2,
            condition_dim,
            ..DitConfig::new([12, 10], 1 + usize::from(denoises))
        });
        let (model, task) = match denoises {
            false => (dit, ObjectiveKind::default()),
            true => (ModelConfig::new(EdmPreconditionerConfig::new(dit)), DiffusionConfig::default().into()),
        };
        let config = Config { model, task, ..Config::default() };
        let fields =
            FieldSpec { extents: vec![12, 10], in_channels: 1, out_channels: 1, ..FieldSpec::default() };
        let given = given(&fields, has_conditions).map(|fields| config.fields_of_model(fields));
        let words = match (has_conditions, condition_dim) {
            (false, None) | (true, Some(_)) => return check_model(&config.model, &given).unwrap(),
            (true, None) => "takes no conditions",
            (false, Some(_)) => "the model reads the array \"conditions\"",
        };
        let error = check_model(&config.model, &given).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
