//! Shared by commands that run a network: its ranks, its data, and the network itself.
//!
//! It depends on no command.

mod channels;
pub(crate) mod chart;
mod cloud;
pub(crate) mod errors;
mod fields;
mod first_stage;
mod identity;
mod kept;
mod opened;
mod part_window;
pub(crate) mod picture;
mod place;
mod portion;
mod ranks;
pub(crate) mod raster;
mod reading;
mod resume;
mod roles;
mod room;
mod scales;
pub(crate) mod scoring;
mod source;
mod statics;
mod task;

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Result, bail};
use isobar_array::{Array, Generator};
use isobar_collectives::Group;
use isobar_data::Normalizer;
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{FieldSpec, Model, ModelConfig};
use isobar_shard::{ParallelRegion, ParamStore};
use isobar_train::config::Predict;
use isobar_train::{
    DenseFields, FieldLayout, Forward, Network, Parameters, Ranks, ShardedFields, Variable, VariableError,
    on_mesh,
};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

pub(crate) use self::channels::Channels;
pub(crate) use self::fields::Fields;
use self::first_stage::FirstStage;
pub(crate) use self::first_stage::{Used, best_or_newest, check_beside};
pub(crate) use self::identity::{identity, other_meaning, shown};
pub(crate) use self::kept::stamps;
use self::opened::Opened;
pub(crate) use self::place::Place;
use self::ranks::Arrangement;
pub(crate) use self::resume::claim;
pub(crate) use self::roles::as_str;
pub(crate) use self::scoring::Scoring;
pub(crate) use self::source::Source;
pub(crate) use self::statics::Statics;
pub(crate) use self::task::TaskRun;
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
    on_device(manager, config, manager.device(), job)
}

/// Does the job as [`with`] does, with the network on `device`. All ranks call.
pub(crate) fn on_device<J: Job>(
    manager: &DistributedManager,
    config: &Config,
    device: Device,
    job: J,
) -> Result<J::Out> {
    let arrangement = Arrangement::new(manager, config)?;
    config.check_task()?;
    let world = manager.group(None)?;
    let first_stage = FirstStage::open(config, job.goes_on_from().as_deref(), &world)?;
    // From the configuration and the file's header, before anything is allocated or read.
    let opened = Opened::new(config, first_stage.as_ref(), J::TRAINS);
    let (opened, _) = all_ok(&world, opened.map(|opened| (Vec::new(), opened)))?;
    room::check(&world, &arrangement, config, &opened.fields, device, J::TRAINS)?;
    let Arrangement { ranks, model, domain } = arrangement;
    if world.rank() == 0 {
        opened.warn(config, domain.as_ref(), J::TRAINS);
    }
    let unbuilt = UnbuiltRun { config, device, opened, first_stage, model };
    match domain {
        None => unbuilt.with_full_fields(ranks, job),
        Some(mesh) => unbuilt.on_mesh(&mesh, &world, job),
    }
}

/// A run whose network is not made yet.
struct UnbuiltRun<'a> {
    config: &'a Config,
    device: Device,
    opened: Opened,
    first_stage: Option<FirstStage>,
    /// Ranks that share a model's channels.
    model: Group,
}

impl UnbuiltRun<'_> {
    /// Makes the network on full fields, and does the job. All ranks call.
    fn with_full_fields<J: Job>(self, ranks: Ranks, job: J) -> Result<J::Out> {
        let Self { config, model, .. } = &self;
        let (mut store, mut of_first) = (self.store(), self.store());
        let load = |stage: &FirstStage| {
            let network = stage.model.build(&mut of_first)?;
            let parameters = Parameters::from_store(&of_first, model)?;
            stage.load((network, self.opened.conditions), parameters, &ranks.world)
        };
        let (regression, used) = self.first_stage.as_ref().map(load).transpose()?.unzip();
        let forward = self.network(config.model.build(&mut store)?).after(regression);
        let parameters = Parameters::from_store(&store, model)?;
        job.run(self.made((ranks, used), parameters, |_| Ok(DenseFields), forward)?)
    }

    /// Makes the network on fields and parameters that are split over a mesh, and does the job. All ranks call.
    fn on_mesh<J: Job>(self, mesh: &DeviceMesh, world: &Group, job: J) -> Result<J::Out> {
        let config = self.config;
        let (mut store, mut of_first) = (self.store(), self.store());
        let load = |stage: &FirstStage| {
            let (mut params, _) = on_mesh(&mut of_first, mesh, world, &stage.model.sharding(), false)?;
            let network = stage.model.build(&mut params)?;
            stage.load((network, self.opened.conditions), Parameters::on_mesh(&of_first, mesh)?, world)
        };
        let (regression, used) = self.first_stage.as_ref().map(load).transpose()?.unzip();
        // Gradients are summed over the mesh in buckets, while backward goes on.
        let (mut params, ranks) = on_mesh(&mut store, mesh, world, &config.model.sharding(), J::TRAINS)?;
        let forward = self.network(config.model.build(&mut params)?).after(regression);
        if let Some(pattern) = params.unmatched().first() {
            bail!(Exit::Usage.because(format!(
                "the sharding of model.type = {:?} names parameters {pattern:?}, which the model does not have; mend its \
                 `Architecture::sharding`",
                config.model.name()
            )));
        }
        let lay_out = |source: &Source| {
            let layout = ShardedFields::new(mesh, &source.extents())?;
            Ok(layout.with_targets(&source.target_extents())?)
        };
        let parameters = Parameters::on_mesh(&store, mesh)?;
        job.run(self.made((ranks, used), parameters, lay_out, forward)?)
    }

    /// An empty store of parameters.
    fn store(&self) -> ParamStore {
        let store = ParamStore::new(Generator::new(self.config.run.seed));
        let store = store.with_options(self.config.train.precision.kind(), self.device);
        store.with_region(ParallelRegion::new(self.model.clone()))
    }

    /// The run's model as a network for its task.
    fn network<A: Array>(&self, model: Box<dyn Model<A>>) -> Network<A> {
        let Self { config, opened, .. } = self;
        let network = Network::new(model).conditioned(opened.conditions);
        let network = network.refining(config.model.coarsening(&opened.fields));
        network.denoising(config.model.denoises()).objective(config.task.clone(), config.run.seed)
    }

    /// Lays out the fields, and reads this rank's window of positions and static fields. All ranks call.
    fn made<L: FieldLayout, F>(
        self,
        (ranks, regression): (Ranks, Option<Used>),
        (params, buffers): (Parameters, Vec<(String, Tensor)>),
        lay_out: impl FnOnce(&Source) -> Result<L>,
        forward: F,
    ) -> Result<Run<L, F>> {
        let Self { config, device, opened: Opened { source, .. }, .. } = self;
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
    use rstest::rstest;
    use serde_json::json;

    use super::*;

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
