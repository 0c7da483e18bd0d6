//! The trained network of a prediction: its checkpoint, and the check that the configuration still describes it.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_train::checkpoint::{self, CheckpointSelector, Checkpoints, Contents, Keep, Loaded};
use isobar_train::{
    Difference, Error, FieldLayout, FieldModel, Forward, Parameters, Ranks, VariableError,
    identity_differences,
};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::Predict;
use super::fields::{Out, Prediction};
use super::origin::Origin;
use super::outcome::Outcome;
use super::rounds::Place;
use super::sharing::{InLayout, OverData};
use crate::checkpoint::explained;
use crate::run::{self, Channels, ModelMetadata, Run, Scoring, Source, Used};
use isobar_command::exit::{Because, Exit};

/// A trained network and its data.
pub(super) struct Trained<L, F> {
    pub(super) source: Source,
    pub(super) model: FieldModel<L, F>,
    /// Validation errors of the baseline, per variable.
    pub(super) baseline: Vec<VariableError>,
    pub(super) origin: Origin,
    pub(super) ranks: Ranks,
    /// The parts of inputs and targets that this rank reads.
    window: Vec<Range<usize>>,
    pub(super) target_window: Vec<Range<usize>>,
    /// Dtype and device of the parameters.
    options: (Kind, Device),
}

impl<L, F> Trained<L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    /// Predicts, each data rank its own samples. All ranks call.
    pub(super) fn predict(
        &self,
        prediction: &Prediction<'_>,
        out: Out<'_>,
        scoring: &Scoring,
    ) -> Result<Outcome> {
        let (model, data) = (&self.model, &self.ranks.data);
        let place = Place {
            window: &self.window,
            target_window: &self.target_window,
            world: &self.ranks.world,
            options: self.options,
        };
        if data.size() == 1 {
            return prediction.run((model, &InLayout(&model.layout)), &place, out, scoring);
        }
        let extents = [&self.source.extents()[..], &self.source.target_extents()];
        prediction.run((model, &OverData::new(&model.layout, data, extents)?), &place, out, scoring)
    }
}

impl Predict<'_> {
    /// Makes the network of a checkpoint. All ranks call.
    pub(super) fn trained<L, F>(&self, run: Run<L, F>) -> Result<Trained<L, F>>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let Run {
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
        } = run;
        let config = self.config;
        let (metadata, origin) =
            self.load((&params, &buffers), regression.as_ref(), &source, &ranks.world)?;
        run::check_beside(&forward, [metadata.forcing.as_ref(), metadata.fixed.as_ref()])?;
        let change = metadata.change()?;
        let ModelMetadata { input, target, baseline, forcing, fixed, .. } = metadata;
        source.set_scales([&input, &target], forcing.as_ref())?;
        let options = (config.train.precision.kind(), device);
        let model = FieldModel {
            forward,
            layout,
            positions: statics.behind(positions, fixed.as_ref(), options)?,
            change,
            input,
            target,
            variables: source.variables()?,
            roles: source.names.roles(&*source.data, &config.data, &window, forcing)?,
            missing: config.data.masks(),
        };
        Ok(Trained { source, model, baseline, origin, ranks, window, target_window, options })
    }

    /// Puts the checkpoint into the network. All ranks call.
    fn load(
        &self,
        (params, buffers): (&Parameters, &[(String, Tensor)]),
        regression: Option<&Used>,
        source: &Source,
        world: &Group,
    ) -> Result<(ModelMetadata, Origin)> {
        let checkpoints = Checkpoints::new(&self.config.run.folder().join("checkpoints"), Keep::ALL, world);
        let mut contents = Contents { params, buffers, optimizer: None };
        let mut load =
            |which: CheckpointSelector| Ok::<_, Error>((checkpoints.load(&which, &mut contents)?, which));
        let loaded = match self.args.checkpoint.as_deref() {
            Some("best") => load(CheckpointSelector::Best).map_err(Into::into),
            Some("latest") => load(CheckpointSelector::Newest).map_err(Into::into),
            Some(path) => load(CheckpointSelector::At(path.into())).map_err(Into::into),
            None => run::best_or_newest(&checkpoints, &mut contents),
        };
        let (Loaded { path, state, .. }, which) = loaded.map_err(|error| self.without_checkpoint(error))?;
        let origin = Origin::new(path.clone(), which, &state);
        if Used::of(&state).as_ref() != regression {
            bail!(Exit::Usage.because(format!(
                "{} was trained with a different first stage than [task] names; restore the [task] settings of its training",
                path.display()
            )));
        }
        self.check_identity(&path, &state.identity)?;
        let trained = Channels::recorded(&state.identity);
        let metadata: ModelMetadata = serde_json::from_value(state.extra).map_err(|error| {
            Exit::Data.because(format!(
                "{} has no normalization of its inputs and outputs ({error}); train it with `isobar train`",
                path.display()
            ))
        })?;
        if let Some(trained) = trained {
            trained.check(&path, source)?;
        }
        Ok((metadata, origin))
    }

    /// Names the option and the way out if there is no checkpoint.
    fn without_checkpoint(&self, error: anyhow::Error) -> anyhow::Error {
        let error = match error.downcast::<Error>() {
            Ok(error @ Error::NoCheckpoint { .. }) => error,
            Ok(error) => return error.into(),
            Err(error) => return error,
        };
        let folder = self.config.run.folder();
        let why = match self.args.checkpoint.as_deref() {
            Some(path) if path != "best" && path != "latest" => {
                let error = explained(error, Path::new(path));
                format!("--checkpoint is {path:?}: {error}; or give best or latest")
            }
            Some("best") if checkpoint::list(&folder).is_ok() => {
                format!("no checkpoint in {} has a validation error; --checkpoint=latest", folder.display())
            }
            _ => format!(
                "no checkpoint in {}; train the run first, or give --checkpoint=PATH",
                folder.display()
            ),
        };
        Exit::Data.because(why).into()
    }

    /// Rejects a configuration of another network than the checkpoint's: with other fields or targets, or with settings of the model
    /// with which the same parameters would compute something else.
    fn check_identity(&self, folder: &Path, trained: &Value) -> Result<()> {
        let now = run::identity(self.config)?;
        // Checkpoints of programs of one's own may have none.
        let both = |key: &str| trained.get(key).zip(now.get(key));
        // Data to predict from may have gaps where those of the training had none, and the other way round.
        let of_gaps = |difference: &Difference| {
            let one_sided = difference.saved.is_null() || difference.now.is_null();
            ["fill", "mask"].contains(&&*difference.key) && one_sided
        };
        let data = both("data").map_or_else(Vec::new, |(trained, now)| run::other_meaning(trained, now));
        let data = data.into_iter().filter(|difference| !of_gaps(difference)).map(|found| ("data", found));
        let model = both("model").map_or_else(Vec::new, |(trained, now)| identity_differences(trained, now));
        match data.chain(model.into_iter().map(|found| ("model", found))).next() {
            None => Ok(()),
            Some((table, Difference { key, saved, now })) => bail!(Exit::Usage.because(format!(
                "{} was trained with {table}.{key} = {}, but the configuration has {}; {}",
                folder.display(),
                run::shown(&saved),
                run::shown(&now),
                match saved {
                    Value::Null => format!("remove {table}.{key}"),
                    saved => format!("--set '{table}.{key}={}'", run::shown(&saved)),
                }
            ))),
        }
    }
}
