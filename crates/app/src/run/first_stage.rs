//! The first of two stages: the trained network that a task calls before its own.

use std::path::Path;

use anyhow::{Result, bail};
use isobar_array::Array;
use isobar_collectives::Group;
use isobar_data::Normalizer;
use isobar_manager::config::{self, Sources};
use isobar_models::{FieldSpec, Model, ModelConfig};
use isobar_train::checkpoint::{
    self, CheckpointSelector, Checkpoints, Contents, Keep, Loaded, RunState, read_run_state,
};
use isobar_train::config::Predict;
use isobar_train::{Conditions, Difference, Error, Forward, Network, Parameters, Regression, objective};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::identity::{meaning, other_meaning, shown};
use super::{ModelMetadata, all_ok, check_model};
use crate::config::{Config, of_run};
use isobar_command::exit::{Because, Exit};

/// A trained run, whose network predicts the mean that a denoiser's samples deviate from.
pub(super) struct FirstStage {
    settings: objective::FirstStage,
    pub(super) model: ModelConfig,
    /// The one that the denoiser was trained with so far.
    recorded: Option<Used>,
}

/// The regression that a denoiser is trained with: in the identity of its run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Used {
    /// Name of the checkpoint's folder.
    checkpoint: String,
    /// Digest of the checkpoint.
    digest: String,
    /// True if the denoiser is given its predictions.
    condition_on_mean: bool,
}

impl Used {
    /// Key of a run's identity.
    pub(crate) const KEY: &'static str = "regression";

    /// The regression of the run that a state belongs to; `None` if it has none.
    pub(crate) fn of(state: &RunState) -> Option<Self> {
        serde_json::from_value(state.identity.get(Self::KEY)?.clone()).ok()
    }
}

impl FirstStage {
    /// Reads the configuration of the run that the task names. `denoiser` is the run or the checkpoint that goes on,
    /// whose regression is used again. All ranks call; an error on all where one fails.
    pub(super) fn open(config: &Config, denoiser: Option<&Path>, world: &Group) -> Result<Option<Self>> {
        let Some(settings) = config.task.first_stage() else { return Ok(None) };
        let opened = trained(&settings, config).and_then(|model| {
            // Rank 0's, since ranks may see the folder at other places.
            let recorded = denoiser.filter(|_| world.rank() == 0).and_then(recorded);
            Ok((serde_json::to_vec(&recorded)?, model))
        });
        let (model, recorded) = all_ok(world, opened)?;
        let recorded = serde_json::from_slice(&recorded[0])?;
        Ok(Some(Self { settings, model, recorded }))
    }

    /// Compares its network with the fields that it is given, and those without conditions of samples.
    pub(super) fn check(&self, given: &[FieldSpec; 2]) -> Result<()> {
        check_model(&self.model, given).map_err(|error| {
            let problem = format!(
                "task.{} is {}: {error}; expected a run whose model takes the fields of the denoiser's [data]",
                self.settings.key,
                self.settings.folder.display()
            );
            Exit::Usage.because(problem).into()
        })
    }

    /// Puts the checkpoint that the denoiser was trained with into its network; at first the run's best, or its newest where there is
    /// no best. All ranks call.
    pub(super) fn load<A: Array>(
        &self,
        (model, conditions): (Box<dyn Model<A>>, Option<Conditions>),
        (params, buffers): (Parameters, Vec<(String, Tensor)>),
        world: &Group,
    ) -> Result<(Regression<A>, Used)> {
        let mut contents = Contents { params: &params, buffers: &buffers, optimizer: None };
        let Loaded { path, state, digest } = self.find(&mut contents, world)?;
        tracing::info!("regression of {}", path.display());
        let metadata: ModelMetadata = serde_json::from_value(state.extra).map_err(|error| {
            Exit::Data.because(format!(
                "{} has no normalization metadata ({error}), expected a checkpoint of `isobar train`; set task.{} to a run that \
                 has one, or train it again",
                path.display(),
                self.settings.key
            ))
        })?;
        let network = Network::new(model).refining(self.model.refinement()).conditioned(conditions);
        let regression = Regression::new(network, [metadata.input, metadata.target])
            .beside([metadata.forcing, metadata.fixed])
            .conditioning(self.settings.is_input);
        let checkpoint = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((regression, Used { checkpoint, digest, condition_on_mean: self.settings.is_input }))
    }

    /// Loads the recorded checkpoint, and refuses another one in its place. All ranks call.
    fn find(&self, contents: &mut Contents<'_>, world: &Group) -> Result<Loaded> {
        let folder = self.settings.folder.join("checkpoints");
        let checkpoints = Checkpoints::new(&folder, Keep::ALL, world);
        let Some(recorded) = &self.recorded else { return Ok(best_or_newest(&checkpoints, contents)?.0) };
        let path = folder.join(&recorded.checkpoint);
        let problem = match checkpoints.load(&CheckpointSelector::At(path.clone()), contents) {
            Ok(loaded) if loaded.digest == recorded.digest => return Ok(loaded),
            Ok(_) => "holds another network now",
            Err(Error::NoCheckpoint { .. }) => "is gone",
            Err(error) => return Err(error.into()),
        };
        bail!(Exit::Usage.because(format!(
            "the denoiser was trained with the regression {}, which {problem}; set task.{} to the run that holds the checkpoint with digest {}, \
             or train the denoiser again",
            path.display(),
            self.settings.key,
            recorded.digest
        )))
    }
}

/// The regression of a run or a checkpoint; `None` also where there is none that can be read, as loading it says.
fn recorded(denoiser: &Path) -> Option<Used> {
    let listed = checkpoint::list(denoiser).ok()?;
    Used::of(&listed.iter().find_map(|listed| read_run_state(&listed.path).ok())?)
}

/// Refuses a regression before `forward` that was trained with other scales of forcings and static fields, `[forcings, statics]`.
pub(crate) fn check_beside<A: Array>(
    forward: &impl Forward<A>,
    beside: [Option<&Normalizer>; 2],
) -> Result<()> {
    let Some(regression) = forward.regression() else { return Ok(()) };
    regression.check_beside(beside).map_err(|error| Exit::Usage.because(error.to_string()).into())
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
fn trained(settings: &objective::FirstStage, second: &Config) -> Result<ModelConfig> {
    let objective::FirstStage { key, folder, .. } = settings;
    let file = of_run(folder).map_err(|error| {
        Exit::Usage.because(format!("task.{key} is {folder:?}: {error}; --set task.{key}=runs/NAME"))
    })?;
    let first: Config = config::load(&Sources::default().file(&file))?.value;
    let refuse = |problem: String| -> Result<ModelConfig> {
        bail!(Exit::Usage.because(format!("task.{key} is {}, {problem}", folder.display())))
    };
    if !first.task.can_be_first_stage() {
        let task = first.task.name();
        return refuse(format!(
            "a run with task.type = \"{task}\", whose prediction is not one call of its network; expected a run with task.type = \
             \"regression\""
        ));
    }
    if [&first, second].iter().any(|stage| stage.data.predict != Predict::Frame) {
        return refuse("and data.predict is \"change\" in one of both; expected \"frame\"".to_owned());
    }
    if first.data.missing != second.data.missing {
        let [own, here] = [&first, second].map(|stage| format!("{:?}", stage.data.missing).to_lowercase());
        return refuse(format!(
            "trained with data.missing = {own}, and the denoiser has {here}; give both the same"
        ));
    }
    match other_meaning(&meaning(&first.data), &meaning(&second.data)).into_iter().next() {
        None => Ok(first.model),
        Some(Difference { key, saved, now }) => refuse(format!(
            "trained with data.{key} = {}, and the denoiser has {}; give both the same",
            shown(&saved),
            shown(&now)
        )),
    }
}

#[cfg(test)]
mod tests {
    use isobar_array::Generator;
    use isobar_models::{FnoConfig, PerDim};
    use isobar_shard::ParamStore;
    use serde_json::json;

    use super::*;

    fn model() -> ModelConfig {
        ModelConfig::new(FnoConfig {
            dimension: 2,
            num_fno_modes: PerDim::All(2),
            latent_channels: 2,
            num_fno_layers: 1,
            ..FnoConfig::new(1, 1)
        })
    }

    fn settings(run: &Path) -> objective::FirstStage {
        objective::FirstStage { key: "regression", folder: run.to_owned(), is_input: false }
    }

    /// Saves a network of this seed.
    fn save(run: &Path, seed: u64, state: RunState) {
        let world = Group::single();
        let mut store = ParamStore::new(Generator::new(seed));
        model().build::<Tensor>(&mut store).unwrap();
        let (params, buffers) = Parameters::from_store(&store, &world).unwrap();
        let contents = Contents { params: &params, buffers: &buffers, optimizer: None };
        Checkpoints::new(&run.join("checkpoints"), Keep::ALL, &world).save(&contents, &state).unwrap();
    }

    /// A step of the first stage.
    fn state(step: u64, error: f64) -> RunState {
        let scales = json!({ "mean": [0.0], "std": [1.0] });
        let extra = json!({ "input": scales, "target": scales, "fields": [], "predict": "frame", "positions": false });
        RunState { step, validation_error: Some(error), extra, ..RunState::default() }
    }

    /// Loads the regression for a denoiser that was trained with the recorded one.
    fn load(run: &Path, recorded: Option<Used>) -> Result<Used> {
        let stage = FirstStage { settings: settings(run), model: model(), recorded };
        let world = Group::single();
        let mut store = ParamStore::new(Generator::new(9));
        let network = stage.model.build::<Tensor>(&mut store)?;
        let parameters = Parameters::from_store(&store, &world)?;
        Ok(stage.load((network, None), parameters, &world)?.1)
    }

    /// Its run goes on, is replaced, and is removed.
    #[test]
    fn a_denoiser_keeps_its_regression() {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 1, state(1, 0.5));
        let first = load(folder.path(), None).unwrap();
        save(folder.path(), 2, state(2, 0.25));
        assert_eq!(load(folder.path(), None).unwrap().checkpoint, "step_00000002");
        assert_eq!(load(folder.path(), Some(first.clone())).unwrap(), first);

        let refused = || load(folder.path(), Some(first.clone())).unwrap_err().to_string();
        let checkpoint = folder.path().join("checkpoints").join(&first.checkpoint);
        std::fs::remove_dir_all(&checkpoint).unwrap();
        assert!(refused().contains("step_00000001, which is gone"), "{}", refused());
        save(folder.path(), 3, state(1, 0.5));
        assert!(refused().contains("step_00000001, which holds another network"), "{}", refused());
    }

    #[test]
    fn the_regression_of_a_run_is_found() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(recorded(folder.path()), None);
        save(folder.path(), 1, state(1, 0.5));
        assert_eq!(recorded(folder.path()), None);
        let used = Used { checkpoint: "step_00000007".into(), digest: "d".into(), condition_on_mean: true };
        save(folder.path(), 1, RunState { identity: json!({ Used::KEY: used }), ..state(2, 0.5) });
        assert_eq!(recorded(folder.path()), Some(used.clone()));
        assert_eq!(recorded(&folder.path().join("checkpoints/step_00000002")), Some(used));
    }

    #[test]
    fn a_run_that_draws_samples_is_no_first_stage() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.toml"), "[task]\ntype = \"diffusion\"\n").unwrap();
        let error = trained(&settings(folder.path()), &Config::default()).unwrap_err().to_string();
        assert!(error.contains("a run with task.type = \"diffusion\", whose prediction"), "{error}");
    }

    #[test]
    fn missing_values_are_filled_alike() {
        let folder = tempfile::tempdir().unwrap();
        let mut second = Config::default();
        second.data.predict = Predict::Frame;
        second.data.missing = isobar_data::Missing::Fill;
        for (first, words) in [("error", "data.missing = error"), ("fill", "data.fill = 2.5")] {
            let text = format!("[data]\npredict = \"frame\"\nmissing = \"{first}\"\nfill = 2.5\n");
            std::fs::write(folder.path().join("config.toml"), text).unwrap();
            let error = trained(&settings(folder.path()), &second).unwrap_err().to_string();
            assert!(error.contains(&format!("trained with {words}, and the denoiser has")), "{error}");
        }
    }
}
