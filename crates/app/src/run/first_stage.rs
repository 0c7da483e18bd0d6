//! The first of two stages: the trained network of `diffusion.regression`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use isobar_array::Array;
use isobar_collectives::Group;
use isobar_manager::config::{self, Sources};
use isobar_models::{FieldSpec, Model, ModelConfig};
use isobar_train::checkpoint::{CheckpointSelector, Checkpoints, Contents, Keep, Loaded};
use isobar_train::config::Predict;
use isobar_train::{Conditions, Error, Network, Parameters, Regression};
use tch::Tensor;

use super::{ModelMetadata, all_ok};
use crate::config::{Config, of_run};
use crate::exit::{Because, Exit};

/// A trained run, whose network predicts the mean that a denoiser's samples deviate from.
pub(super) struct FirstStage {
    folder: PathBuf,
    pub(super) model: ModelConfig,
    conditions: bool,
}

impl FirstStage {
    /// Reads the configuration of the run that `diffusion.regression` names. All ranks call; an error on all where one fails.
    pub(super) fn open(config: &Config, world: &Group) -> Result<Option<Self>> {
        let Some(diffusion) = &config.diffusion else { return Ok(None) };
        let Some(folder) = &diffusion.regression else { return Ok(None) };
        let opened = trained(folder, config).map(|model| (Vec::new(), model));
        let (model, _) = all_ok(world, opened)?;
        Ok(Some(Self { folder: folder.clone(), model, conditions: diffusion.condition_on_mean }))
    }

    /// Compares its network with the fields of the data.
    pub(super) fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.model.check(fields).map_err(|error| {
            let problem = format!("diffusion.regression is {}: {error}", self.folder.display());
            Exit::Usage.because(problem).into()
        })
    }

    /// Puts the run's best checkpoint, or its newest where there is no best, into its network. All ranks call.
    pub(super) fn load<A: Array>(
        &self,
        (model, conditions): (Box<dyn Model<A>>, Option<Conditions>),
        (params, buffers): (Parameters, Vec<(String, Tensor)>),
        world: &Group,
    ) -> Result<Regression<A>> {
        let checkpoints = Checkpoints::new(&self.folder.join("checkpoints"), Keep::ALL, world);
        let mut contents = Contents { params: &params, buffers: &buffers, optimizer: None };
        let (Loaded { path, state }, _) = best_or_newest(&checkpoints, &mut contents)?;
        tracing::info!("regression of {}", path.display());
        let metadata: ModelMetadata = serde_json::from_value(state.extra).map_err(|error| {
            Exit::Data.because(format!("{} has no normalization metadata ({error})", path.display()))
        })?;
        let network = Network::new(model).refining(self.model.refinement()).conditioned(conditions);
        Ok(Regression::new(network, [metadata.input, metadata.target]).conditioning(self.conditions))
    }
}

/// Loads the best checkpoint, or the newest where there is no best. All ranks call.
pub(crate) fn best_or_newest(
    checkpoints: &Checkpoints,
    contents: &mut Contents<'_>,
) -> Result<(Loaded, CheckpointSelector)> {
    match checkpoints.load(&CheckpointSelector::Best, contents) {
        Err(Error::NoCheckpoint { .. }) => {
            Ok((checkpoints.load(&CheckpointSelector::Newest, contents)?, CheckpointSelector::Newest))
        }
        loaded => Ok((loaded?, CheckpointSelector::Best)),
    }
}

/// The model of a trained run that reads and predicts what `second` does.
fn trained(folder: &Path, second: &Config) -> Result<ModelConfig> {
    let first: Config = config::load(&Sources::default().file(&of_run(folder)?))?.value;
    let refuse = |problem: String| -> Result<ModelConfig> {
        bail!(Exit::Usage.because(format!("diffusion.regression is {}, {problem}", folder.display())))
    };
    if first.diffusion.is_some() {
        return refuse("a denoiser; expected the folder of a run without [diffusion]".to_owned());
    }
    if [&first, second].iter().any(|stage| stage.data.predict != Predict::Frame) {
        return refuse("and data.predict is \"change\" in one of both; expected \"frame\"".to_owned());
    }
    let channels = |stage: &Config| {
        let data = &stage.data;
        [
            ("fields", format!("{:?}", data.fields)),
            ("inputs", format!("{:?}", data.inputs)),
            ("targets", format!("{:?}", data.targets)),
            ("forcings", format!("{:?}", data.forcings)),
            ("statics", format!("{:?}", data.statics)),
            ("scalars", format!("{:?}", data.scalars)),
            ("scalars_as", format!("{:?}", data.scalars_as).to_lowercase()),
            ("diagnostics", format!("{:?}", data.diagnostics)),
            ("history", data.history.to_string()),
            ("levels", format!("{:?}", data.levels)),
            ("positions", data.positions.to_string()),
        ]
    };
    match channels(&first).iter().zip(&channels(second)).find(|(first, second)| first != second) {
        None => Ok(first.model),
        Some(((key, own), (_, here))) => refuse(format!(
            "trained with data.{key} = {own}, and the denoiser has {here}; give both the same"
        )),
    }
}
