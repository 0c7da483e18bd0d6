//! `isobar predict`: predictions of a trained network for the fields of a data set.
//!
//! It trains nothing: parameters come from a checkpoint.

mod fields;
mod origin;
mod outcome;
mod output;
mod samples;
mod windows;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use isobar_collectives::Group;
use isobar_data::Parts;
use isobar_manager::config::{Resolved, agree};
use isobar_manager::{DistributedManager, logging};
use isobar_train::checkpoint::{self, CheckpointSelector, Checkpoints, Contents, Keep, Loaded};
use isobar_train::{Difference, Error, FieldLayout, FieldModel, Forward, Parameters, identity_differences};
use serde_json::Value;
use tch::Tensor;

use self::fields::Place;
use self::origin::Origin;
use crate::checkpoint::explained;
use crate::config::{Config, ConfigArgs};
use crate::run::{self, Channels, Job, ModelMetadata, PER_RANK_KEYS, Run, Scoring, Source, Used, scoring};
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, start, terminal};

/// Arguments of `isobar predict`.
#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// `best`, `latest`, or a checkpoint's folder; by default the best, or the latest if there is no best.
    /// `best` and `latest` skip incomplete checkpoints
    #[arg(long, value_name = "WHICH")]
    checkpoint: Option<String>,
    /// Numbers of samples or trajectories of the data file, from 0, as `0,3,5` or `0-3,7`; by default those kept for validation
    #[arg(long, value_name = "NUMBERS", allow_negative_numbers = true, value_delimiter = ',', value_parser = samples::parse)]
    samples: Option<Vec<RangeInclusive<usize>>>,
    /// Initial frame, for trajectories; by default the first one that has the frames of `data.history` before it
    #[arg(long, value_name = "FRAME", allow_negative_numbers = true)]
    start: Option<usize>,
    /// Number of steps, for trajectories; by default up to the file's last frame, or 1 for an ensemble. May be larger
    #[arg(long, value_name = "STEPS", allow_negative_numbers = true)]
    steps: Option<usize>,
    /// The file to write: HDF5 in the layout of the data, or with the extension .nc NetCDF-4 or .zarr Zarr with the conventions of CF; by default
    /// prediction.h5 in the folder of the run. A picture and a
    /// table of the errors after each step (CSV) get the same name
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn command(args: &PredictArgs) -> Result<Exit> {
    let resolved = args.config.load(&[])?;
    let config = &resolved.value;
    let manager = start::for_run(&config.distributed, &config.run.folder())?;
    logging::init(&config.distributed.log, manager.rank(), None)?;
    predict(&manager, &resolved, args)?;
    DistributedManager::cleanup(true)?;
    Ok(Exit::Good)
}

fn predict(manager: &DistributedManager, resolved: &Resolved<Config>, args: &PredictArgs) -> Result<()> {
    agree(resolved, &manager.group(None)?, &PER_RANK_KEYS)?;
    let config = &resolved.value;
    config.data.check()?;
    config.check_task()?;
    let said = run::with(manager, config, Prediction { config, args })?;
    if manager.rank() == 0 {
        said.iter().for_each(|line| terminal::line(line));
    }
    Ok(())
}

/// Predicts, and returns the lines to print.
struct Prediction<'a> {
    config: &'a Config,
    args: &'a PredictArgs,
}

impl Job for Prediction<'_> {
    type Out = Vec<String>;
    const TRAINS: bool = false;

    fn goes_on_from(&self) -> Option<PathBuf> {
        match self.args.checkpoint.as_deref() {
            Some("best" | "latest") | None => Some(self.config.run.folder()),
            Some(path) => Some(path.into()),
        }
    }

    fn run<L, F>(self, run: Run<L, F>) -> Result<Self::Out>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let Self { config, args } = self;
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
        let (metadata, origin) =
            self.load((&params, &buffers), regression.as_ref(), &source, &ranks.world)?;
        run::check_beside(&forward, [metadata.forcing.as_ref(), metadata.fixed.as_ref()])?;
        let (change, variables) = (metadata.change()?, source.variables()?);
        let ModelMetadata { input, target, baseline, forcing, fixed, .. } = metadata;
        source.set_scales([&input, &target], forcing.as_ref())?;
        let names = variables.clone();
        let options = (config.train.precision.kind(), device);
        let positions = statics.behind(positions, fixed.as_ref(), options)?;
        let roles = source.names.roles(&*source.data, &config.data, &window, forcing)?;
        let missing = config.data.masks();
        let model = FieldModel {
            forward,
            layout,
            positions,
            change,
            input,
            target,
            variables: names,
            roles,
            missing,
        };

        let samples = self.samples(&source)?;
        let out = args.out.clone().unwrap_or_else(|| config.run.folder().join("prediction.h5"));
        if ["csv", "png"].iter().any(|other| out.extension().is_some_and(|own| own == *other)) {
            let beside =
                "--out names an HDF5 file, beside which a picture (.png) and errors (.csv) are written";
            bail!(Exit::Usage.because(format!("{beside}; {} would be one of these", out.display())));
        }
        let beside = Beside::new(&out);
        let written = [&out, &beside.errors, &beside.curves, &beside.metrics, &beside.picture];
        outputs::check("--out", &written, &self.inputs(&source))?;
        let writes = ranks.world.rank() == 0;
        let mut attributes = origin.attributes();
        attributes.push(("isobar_data", source.path().to_string()));
        if source.has_own_targets() {
            attributes.push(("isobar_target_data", source.targets().path().display().to_string()));
        }
        attributes.push(("isobar_samples", samples::text(&samples)));
        let scoring = Scoring::new(&source, config, &target_window, &ranks.world)?;
        let place = Place { window: &window, target_window: &target_window, world: &ranks.world, options };
        let mut said = vec![origin.line()];
        let name = format!("{} by {}", source.data.name(), config.run.name);
        let (start, steps) = self.steps(&source)?;
        let prediction = fields::Prediction {
            source: &source,
            samples: &samples,
            start,
            steps,
            name,
            masked: missing.is_some(),
        };
        let numbers = samples::text(&samples);
        let outcome;
        let (lines, warning) = if source.has_steps() {
            attributes.push(("isobar_start_frame", start.to_string()));
            attributes.push(("isobar_steps", steps.to_string()));
            let out = (&*out, &attributes[..]);
            outcome = prediction.of_trajectories(&model, &place, out, &scoring)?;
            said.push(format!("samples     trajectories {numbers}, {steps} steps from frame {start}"));
            outcome.forecast(&variables)
        } else {
            let out = (&*out, &attributes[..]);
            outcome = prediction.of_pairs(&model, &place, out, &scoring)?;
            said.push(format!("samples     {numbers}"));
            outcome.mapping(&variables, &baseline)
        };
        let times = prediction.times();
        said.extend(lines);
        let scores = outcome.board.scores();
        said.extend(scoring::table(&scores, &scoring.report, &variables));
        if writes {
            warning.iter().for_each(|warning| tracing::warn!("{warning}"));
            said.push(format!("prediction  {}", out.display()));
            let Beside { errors, curves, metrics, picture } = beside;
            outcome.write_csv(
                &errors,
                &variables,
                &times,
                if source.has_steps() { &[] } else { &baseline },
            )?;
            said.push(format!("errors      {}", errors.display()));
            if source.has_steps() && outcome.draw_errors(&curves, &variables, &times)? {
                said.push(format!("curves      {}", curves.display()));
            }
            if !scores.is_empty() {
                scoring::write(&metrics, &scores, &variables, &times)?;
                said.push(format!("metrics     {}", metrics.display()));
            }
            if let Some(shown) = &outcome.first {
                shown.draw(source.has_steps(), &source.titles()?, &picture)?;
                said.push(format!("picture     {}", picture.display()));
            }
        }
        Ok(said)
    }
}

/// Most steps of a prediction: times, errors and metrics of all steps are kept until the end.
const MOST_STEPS: usize = 1 << 20;

/// Files that are written beside a prediction.
struct Beside {
    errors: PathBuf,
    curves: PathBuf,
    metrics: PathBuf,
    picture: PathBuf,
}

impl Beside {
    fn new(out: &Path) -> Self {
        Self {
            errors: out.with_extension("csv"),
            curves: out.with_extension("errors.png"),
            metrics: out.with_extension("metrics.jsonl"),
            picture: out.with_extension("png"),
        }
    }
}

impl Prediction<'_> {
    /// The files and folders that are read. Those of the run are known by its folder.
    fn inputs(&self, source: &Source) -> Vec<PathBuf> {
        let Parts { train, validation, test, .. } = &source.parts;
        let parts = [Some(train), Some(validation), test.as_ref()].into_iter().flatten();
        let data = parts.flat_map(|part| part.data.files().into_iter().chain(part.targets().files()));
        let named = [
            Some(self.args.config.file().to_owned()),
            self.args.checkpoint.clone().map(PathBuf::from),
            self.config.metrics.climatology.clone(),
        ];
        // Folders are those of runs and checkpoints.
        data.chain(named.into_iter().flatten().filter(|path| path.is_file())).collect()
    }

    /// The samples that are asked for, or those kept for validation.
    fn samples(&self, source: &Source) -> Result<Vec<usize>> {
        let there = source.samples();
        let Some(ranges) = &self.args.samples else {
            let kept: Vec<usize> = source.parts.predicted().samples.clone().collect();
            if kept.is_empty() {
                bail!(Exit::Usage.because("there is no sample to predict: name some with --samples"));
            }
            return Ok(kept);
        };
        if let Some(range) = ranges.iter().find(|range| *range.end() >= there) {
            bail!(Exit::Usage.because(format!(
                "sample {} is asked for; {} has {there}, from 0 to {}",
                range.end(),
                source.path(),
                there.saturating_sub(1)
            )));
        }
        let samples: Vec<usize> = ranges.iter().cloned().flatten().collect();
        match samples::repeated(&samples) {
            None => Ok(samples),
            Some(sample) => {
                bail!(Exit::Usage.because(format!("--samples has {sample} twice; give each sample once")))
            }
        }
    }

    /// Initial frame and number of steps to predict; 0 for samples without time.
    fn steps(&self, source: &Source) -> Result<(usize, usize)> {
        let args = self.args;
        let Some(times) = source.data.times() else {
            if args.start.is_some_and(|start| start != 0) || args.steps.is_some_and(|steps| steps != 1) {
                bail!(Exit::Usage.because(format!(
                    "samples of {} have no steps: leave --start and --steps away",
                    source.path()
                )));
            }
            return Ok((0, 0));
        };
        let (first, last) = (self.config.data.history - 1, times.len() - 1);
        let start = args.start.unwrap_or(first);
        if start > last {
            bail!(Exit::Usage.because(format!(
                "--start is {start}, but {} has the frames 0 to {last}; --start={}",
                source.path(),
                first.min(last)
            )));
        }
        let members = self.config.task.members();
        let steps = args.steps.unwrap_or(if members > 1 { 1 } else { last.saturating_sub(start) });
        if steps > MOST_STEPS {
            bail!(Exit::Usage.because(format!("--steps is {steps}, expected at most {MOST_STEPS}")));
        }
        if members > 1 && steps > 1 {
            bail!(Exit::Usage.because(format!(
                "[task] has {members} members, and {steps} steps are asked for: ensembles are of one step; --steps=1, or --set \
                 task.members=1"
            )));
        }
        if steps == 0 {
            bail!(Exit::Usage.because(format!(
                "the number of steps from frame {start} is 0, expected 1 or more: {} has the frames 0 to {last}; start earlier, or give the number of \
                 steps, as in --steps=1",
                source.path()
            )));
        }
        if start < first {
            bail!(Exit::Usage.because(format!(
                "--start={start} has {start} frames before it, but data.history is {}: --start={first} or later",
                first + 1
            )));
        }
        // A step takes the forcings of the frame that it starts from.
        let known = last - start + 1;
        if steps > known && !source.names.forcings.is_empty() {
            bail!(Exit::Usage.because(format!(
                "{steps} steps from frame {start} need more frames than {} has of the forcings {:?}; use --steps={known}",
                source.path(),
                source.names.forcings
            )));
        }
        Ok((start, steps))
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
        self.means_the_same(&path, &state.identity)?;
        let trained = Channels::recorded(&state.identity);
        let metadata: ModelMetadata = serde_json::from_value(state.extra).map_err(|error| {
            Exit::Data.because(format!(
                "{} does not say what its network's numbers mean ({error}); train it with `isobar train`",
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

    /// Rejects another network than the checkpoint's: one that was trained on other fields, or to predict something else, or has
    /// other settings, with which the same parameters would compute something else.
    fn means_the_same(&self, folder: &Path, trained: &Value) -> Result<()> {
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
