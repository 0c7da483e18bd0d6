//! Shared by commands that run a network: its ranks, its data, and the network itself.
//!
//! It depends on no command.

mod channels;
pub(crate) mod chart;
pub(crate) mod errors;
mod fields;
mod first_stage;
mod identity;
mod kept;
pub(crate) mod picture;
mod portion;
mod ranks;
mod raster;
mod resume;
mod roles;
mod room;
mod scales;
pub(crate) mod scoring;
mod source;
mod statics;

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Result, bail};
use isobar_array::{Array, Generator};
use isobar_collectives::Group;
use isobar_data::{Normalizer, Part, Parts, missing_frames, usual_step};
use isobar_manager::DistributedManager;
use isobar_models::{Batch, FieldSpec, ModelConfig};
use isobar_shard::{ParallelRegion, ParamStore};
use isobar_train::config::{DataConfig, Predict};
use isobar_train::{
    DenseFields, FieldLayout, Forward, Network, Parameters, Ranks, ShardedFields, Variable, VariableError,
    idle_ranks, on_mesh,
};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

pub(crate) use self::channels::Channels;
pub(crate) use self::fields::{Fields, Place};
use self::first_stage::FirstStage;
pub(crate) use self::first_stage::{Used, best_or_newest, check_beside};
pub(crate) use self::identity::{identity, other_meaning, shown};
pub(crate) use self::kept::stamps;
use self::ranks::Arrangement;
pub(crate) use self::resume::claim;
pub(crate) use self::roles::as_str;
pub(crate) use self::scoring::Scoring;
pub(crate) use self::source::Source;
pub(crate) use self::statics::Statics;
use crate::config::Config;
use isobar_command::exit::{self, Because, Exit};

/// Keys that may differ between ranks: addresses, logging, and paths of the own machine.
pub(crate) const PER_RANK_KEYS: [&str; 13] = [
    "distributed.method",
    "distributed.addr",
    "distributed.port",
    "distributed.interface",
    "distributed.timeout_s",
    "distributed.log",
    "run.output",
    "data.path",
    "data.validation_path",
    "data.test_path",
    "data.target.path",
    "data.target.validation_path",
    "data.target.test_path",
];

/// The network of a configuration, and where its data are.
pub(crate) struct Run<L, F> {
    /// The data file.
    pub(crate) source: Source,
    /// Layout of the fields.
    pub(crate) layout: L,
    /// The part of every input that this rank reads.
    pub(crate) window: Vec<Range<usize>>,
    /// The part of every target that this rank reads.
    pub(crate) target_window: Vec<Range<usize>>,
    /// Positions of its points, if the network takes them.
    pub(crate) positions: Option<Tensor>,
    /// Static fields of its points.
    pub(crate) statics: Statics,
    /// The network.
    pub(crate) forward: F,
    /// Its parameters.
    pub(crate) params: Parameters,
    /// Its buffers, by name.
    pub(crate) buffers: Vec<(String, Tensor)>,
    /// The trained regression before it, if there is one.
    pub(crate) regression: Option<Used>,
    /// The ranks.
    pub(crate) ranks: Ranks,
    /// Device of the parameters.
    pub(crate) device: Device,
}

/// Metadata of a network, which a checkpoint keeps with its parameters.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ModelMetadata {
    /// Normalization of its inputs.
    pub(crate) input: Normalizer,
    /// Normalization of its outputs.
    pub(crate) target: Normalizer,
    /// Meaning of its outputs.
    pub(crate) predict: Predict,
    /// Scales of changes, if its outputs are changes. Missing in checkpoints of earlier versions, which
    /// divide by the deviation of the inputs.
    #[serde(default)]
    pub(crate) change: Option<Normalizer>,
    /// Normalisation of forcings that the data have, and of scalars of trajectories.
    #[serde(default)]
    pub(crate) forcing: Option<Normalizer>,
    /// Normalisation of static fields that the data have.
    #[serde(default)]
    pub(crate) fixed: Option<Normalizer>,
    /// Variables of its output channels; empty in checkpoints of earlier versions.
    #[serde(default)]
    pub(crate) variables: Vec<Variable>,
    /// Validation errors of the baseline, per variable.
    #[serde(default)]
    pub(crate) baseline: Vec<VariableError>,
}

impl ModelMetadata {
    /// Scales of changes, if outputs are changes.
    pub(crate) fn change(&self) -> Result<Option<Normalizer>> {
        match self.predict {
            Predict::Frame => Ok(None),
            Predict::Change => Ok(Some(match &self.change {
                Some(change) => change.clone(),
                None => Normalizer::of_scales(self.input.std())?,
            })),
        }
    }
}

/// Work on a [`Run`], for full or sharded fields.
pub(crate) trait Job {
    /// Result of the job.
    type Out;

    /// True if parameters are trained; otherwise they are replicated on all ranks.
    const TRAINS: bool;

    /// The run's folder or the checkpoint that it goes on from, which name the regression to use; `None` if it starts anew.
    fn goes_on_from(&self) -> Option<PathBuf>;

    /// Does it. All ranks call.
    fn run<L, F>(self, run: Run<L, F>) -> Result<Self::Out>
    where
        L: FieldLayout,
        F: Forward<L::Array>;
}

/// Arranges the ranks, opens the data, makes the network, and does the job. All ranks call.
pub(crate) fn with<J: Job>(manager: &DistributedManager, config: &Config, job: J) -> Result<J::Out> {
    let arrangement = Arrangement::new(manager, config)?;
    let device = manager.device();
    config.check_task()?;
    let world = manager.group(None)?;
    let first_stage = FirstStage::open(config, job.goes_on_from().as_deref(), &world)?;
    // From the configuration and the file's header, before anything is allocated or read.
    let opened = Source::open(&config.data, config.model.time_unit()).and_then(|source| {
        if J::TRAINS {
            source.has_samples(&config.data)?;
        }
        let mut fields = source.spec(&config.data)?;
        let conditions = source.names.conditions(&*source.data, &config.data, &fields)?;
        if let Some(conditions) = &conditions {
            fields.in_channels -= conditions.count;
        }
        let given = given(&fields, conditions.is_some());
        first_stage.iter().try_for_each(|stage| stage.check(&given))?;
        config.check_fields(&fields, conditions.is_some())?;
        let given = given.map(|fields| config.fields_of_model(fields));
        check_model(&config.model, &given)?;
        let [fields, _] = given;
        Ok((Vec::new(), (source, fields, conditions)))
    });
    let ((source, fields, conditions), _) = all_ok(&world, opened)?;
    room::check(&world, &arrangement, config, &fields, device, J::TRAINS)?;
    let Arrangement { ranks, model, domain } = arrangement;
    if world.rank() == 0 {
        warn_of_gaps(&source, J::TRAINS);
        warn_of_steps(&source, J::TRAINS);
        if J::TRAINS {
            warn_of_shared_files(&source, &config.data);
        }
    }
    if let Some(mesh) = &domain
        && J::TRAINS
        && world.rank() == 0
    {
        let warnings = idle_ranks(mesh, config.model.sharding().grid(), "tokens");
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    }
    let store = || {
        let options = (config.train.precision.kind(), device);
        let store = ParamStore::new(Generator::new(config.run.seed)).with_options(options.0, options.1);
        store.with_region(ParallelRegion::new(model.clone()))
    };
    let (mut store, mut of_first) = (store(), store());
    match domain {
        None => {
            let load = |stage: &FirstStage| {
                let network = stage.model.build(&mut of_first)?;
                stage.load((network, conditions), Parameters::from_store(&of_first, &model)?, &world)
            };
            let (regression, used) = first_stage.as_ref().map(load).transpose()?.unzip();
            let network = Network::new(config.model.build(&mut store)?).conditioned(conditions);
            let forward = for_task(config, &fields, network).after(regression);
            let parameters = Parameters::from_store(&store, &model)?;
            job.run(made((config, device, source), (ranks, used), parameters, |_| Ok(DenseFields), forward)?)
        }
        Some(mesh) => {
            // Gradients are summed over the mesh in buckets, while backward goes on.
            let sharding = config.model.sharding();
            let load = |stage: &FirstStage| {
                let sharding = stage.model.sharding();
                let (mut params, _) = on_mesh(&mut of_first, &mesh, &world, &sharding, false)?;
                let network = stage.model.build(&mut params)?;
                stage.load((network, conditions), Parameters::on_mesh(&of_first, &mesh)?, &world)
            };
            let (regression, used) = first_stage.as_ref().map(load).transpose()?.unzip();
            let (mut params, ranks) = on_mesh(&mut store, &mesh, &world, &sharding, J::TRAINS)?;
            let network = Network::new(config.model.build(&mut params)?).conditioned(conditions);
            let forward = for_task(config, &fields, network).after(regression);
            if let Some(pattern) = params.unmatched().first() {
                bail!(Exit::Usage.because(format!(
                    "the sharding of model.type = {:?} names parameters {pattern:?}, which the model does not have; mend its \
                     `Architecture::sharding`",
                    config.model.name()
                )));
            }
            let lay_out = |source: &Source| {
                let layout = ShardedFields::new(&mesh, &source.extents())?;
                Ok(layout.with_targets(&source.target_extents())?)
            };
            let parameters = Parameters::on_mesh(&store, &mesh)?;
            job.run(made((config, device, source), (ranks, used), parameters, lay_out, forward)?)
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

/// The network of the run's model for its task, on such fields.
fn for_task<A: Array>(config: &Config, fields: &FieldSpec, network: Network<A>) -> Network<A> {
    let network = network.refining(config.model.coarsening(fields)).denoising(config.model.denoises());
    network.objective(config.task.clone(), config.run.seed)
}

/// Compares a model with the fields that it is given; one that is given conditions must read them.
fn check_model(model: &ModelConfig, [given, without]: &[FieldSpec; 2]) -> Result<()> {
    model.check(given)?;
    if given.arrays != without.arrays && model.check(without).is_ok() {
        bail!(Exit::Usage.because(format!(
            "data.scalars_as is \"conditions\", and model.type = {:?} takes no conditions; set condition_dim or label_dim, or leave \
             data.scalars_as out",
            model.name()
        )));
    }
    Ok(())
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

fn made<L: FieldLayout, F>(
    (config, device, source): (&Config, Device, Source),
    (ranks, regression): (Ranks, Option<Used>),
    (params, buffers): (Parameters, Vec<(String, Tensor)>),
    lay_out: impl FnOnce(&Source) -> Result<L>,
    forward: F,
) -> Result<Run<L, F>> {
    let laid_out = lay_out(&source).and_then(|layout| {
        let window = layout.window(&source.extents())?;
        let target_window = layout.targets().window(&source.target_extents())?;
        let positions = config.data.positions.then(|| source.positions(&window)).transpose()?;
        let kind = config.train.precision.kind();
        let positions =
            positions.map(|positions| positions.f_to_device(device)?.f_to_kind(kind)).transpose()?;
        let statics = Statics::read(&source, &window, config.data.fill)?;
        Ok((Vec::new(), (layout, [window, target_window], positions, statics)))
    });
    let ((layout, [window, target_window], positions, statics), _) = all_ok(&ranks.world, laid_out)?;
    Ok(Run {
        source,
        layout,
        window,
        target_window,
        positions,
        statics,
        forward,
        params,
        buffers,
        regression,
        ranks,
        device,
    })
}

/// Returns this rank's value and all ranks' bytes; an error on all ranks if one has failed. All ranks must call.
pub(crate) fn all_ok<T>(world: &Group, own: Result<(Vec<u8>, T)>) -> Result<(T, Vec<Vec<u8>>)> {
    let told = own.as_ref().map(|(words, _)| words).map_err(exit::text);
    let all = world.all_gather_bytes(&serde_json::to_vec(&told)?);
    let ((_, made), all) = (own?, all?);
    let mut words = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        let other: Result<Vec<u8>, String> = serde_json::from_slice(bytes)?;
        words.push(other.map_err(|error| Exit::Lost.because(format!("rank {rank} cannot go on: {error}")))?);
    }
    Ok((made, words))
}

#[cfg(test)]
mod tests {
    use isobar_models::{DitConfig, EdmPreconditionerConfig, PerDim};
    use isobar_train::DiffusionConfig;
    use isobar_train::objective::ObjectiveKind;
    use rstest::rstest;
    use serde_json::json;

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

    /// A model whose outputs are not on the targets' grid; the error names the key that mends it.
    #[rstest]
    #[case(json!({ "type": "pix2pix", "dimension": 2, "n_downsampling": 1, "n_upsampling": 3 }), [4, 4], None)]
    #[case(json!({ "type": "pix2pix", "dimension": 2, "n_downsampling": 1 }), [2, 2], Some("--set model.n_upsampling=2"))]
    #[case(json!({ "type": "pix2pix", "dimension": 2, "n_downsampling": 1 }), [2, 3], Some("1, 2, 4, … times the points"))]
    #[case(json!({ "type": "sr_res_net", "scaling_factor": 2 }), [2, 2], None)]
    #[case(json!({ "type": "sr_res_net", "scaling_factor": 8 }), [4, 4], Some("--set model.scaling_factor=4"))]
    #[case(json!({ "type": "sr_res_net" }), [3, 3], Some("2, 4 or 8 times the points"))]
    #[case(json!({ "type": "fno", "dimension": 2, "num_fno_modes": 4 }), [2, 2], Some("for inputs of [12, 10] points the model's outputs have [12, 10]"))]
    fn outputs_are_on_the_grid_of_the_targets(
        #[case] mut model: serde_json::Value,
        #[case] factors: [usize; 2],
        #[case] words: Option<&str>,
    ) {
        (model["in_channels"], model["out_channels"]) = (1.into(), 1.into());
        let [rows, columns] = factors;
        let depth: &[usize] = if model["type"] == "sr_res_net" { &[5] } else { &[] };
        let model: ModelConfig = serde_json::from_value(model).unwrap();
        let extents = [&[12, 10], depth].concat();
        let targets =
            [&[12 * rows, 10 * columns][..], &depth.iter().map(|own| own * rows).collect::<Vec<_>>()];
        let fields = FieldSpec {
            extents,
            target_extents: Some(targets.concat()),
            in_channels: 1,
            out_channels: 1,
            ..FieldSpec::default()
        };
        assert_eq!(model.coarsening(&fields), 1);
        match words {
            None => model.check(&fields).unwrap(),
            Some(words) => {
                let error = model.check(&fields).unwrap_err().to_string();
                assert!(error.contains(words), "{error}");
            }
        }
    }

    /// Checkpoints of earlier versions do not record the scales of changes: the deviation of the inputs.
    #[test]
    fn checkpoints_of_earlier_versions_mean_what_they_meant() {
        let normalizer = serde_json::json!({ "mean": [0.0, 9800.0], "std": [4.0, 130.0] });
        let mut saved = serde_json::json!({
            "input": normalizer, "target": normalizer, "fields": ["u", "h"], "predict": "change", "positions": false,
        });
        let metadata: ModelMetadata = serde_json::from_value(saved.clone()).unwrap();
        assert_eq!(metadata.change().unwrap(), Some(Normalizer::of_scales(&[4.0, 130.0]).unwrap()));
        assert!(metadata.variables.is_empty() && metadata.baseline.is_empty());
        saved["change"] = serde_json::json!({ "mean": [0.0, 0.0], "std": [0.5, 2.0] });
        let metadata: ModelMetadata = serde_json::from_value(saved.clone()).unwrap();
        assert_eq!(metadata.change().unwrap(), Some(Normalizer::of_scales(&[0.5, 2.0]).unwrap()));
        saved["predict"] = "frame".into();
        let metadata: ModelMetadata = serde_json::from_value(saved).unwrap();
        assert_eq!(metadata.change().unwrap(), None);
    }
}
