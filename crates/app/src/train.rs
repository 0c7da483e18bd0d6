//! `isobar train`: a configuration becomes ranks, data, a model and a run.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use isobar_data::area_weights;
use isobar_manager::config::{Resolved, agree};
use isobar_manager::{DistributedManager, format_bytes, logging};
use isobar_train::config::{CheckpointConfig, DataConfig, Predict, Resume};
use isobar_train::{
    BoxError, DataParallelConfig, Error, FieldLayout, FitConfig, Forward, ProgressMode, Ranks, RunFolder,
    Signals, Stop, Summary, Variable, VariableError, fit, spectra_line,
};

use crate::check;
use crate::config::{Config, ConfigArgs};
use crate::run::errors::{self, Compared};
use crate::run::{
    self, Channels, Fields, Job, ModelMetadata, PER_RANK_KEYS, Place, Run, Scoring, TaskRun, Used, picture,
    scoring,
};
use crate::unused::unused;
use isobar_command::exit::{self, Because, Exit};
use isobar_command::{start, terminal};

/// Arguments of `isobar train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Resume from the newest complete checkpoint of the run; `must` is an error where there is none
    #[arg(long, value_enum, value_name = "HOW", num_args = 0..=1, default_missing_value = "auto", require_equals = true)]
    resume: Option<ResumeArg>,
    /// Start from the beginning, and replace the results of an earlier run in the folder once the new run has
    /// a checkpoint
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Progress display of rank 0; by default a bar if rank 0 or `isobar launch` writes to a terminal, else
    /// lines
    #[arg(long, value_enum, value_name = "HOW")]
    progress: Option<ProgressArg>,
}

/// Display of progress.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ProgressArg {
    /// A bar even without a terminal, for launchers such as mpirun that forward it to one
    Bar,
    /// A line after every tenth of an epoch, and every 30 seconds
    Lines,
    /// A line at the end of each epoch
    Off,
}

impl From<ProgressArg> for ProgressMode {
    fn from(how: ProgressArg) -> Self {
        match how {
            ProgressArg::Bar => Self::Bar,
            ProgressArg::Lines => Self::Lines,
            ProgressArg::Off => Self::Off,
        }
    }
}

/// Choice for a run that has checkpoints; by default that of the configuration.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ResumeArg {
    /// Resume from the newest complete one; start from the beginning where there is none
    Auto,
    /// Resume from the newest complete one; fail where there is none
    Must,
    /// Start from the beginning; fail where the folder holds results of an earlier run
    Never,
}

/// Runs the command.
pub(crate) fn command(args: &TrainArgs) -> Result<Exit> {
    let resume = args.resume.and_then(|resume| resume.to_possible_value());
    let mut overrides: Vec<String> =
        resume.iter().map(|how| format!("checkpoint.resume={}", how.get_name())).collect();
    if args.resume.is_some_and(|resume| !matches!(resume, ResumeArg::Never)) {
        overrides.push("checkpoint.overwrite=false".to_owned());
    }
    if args.overwrite {
        overrides.extend(["checkpoint.resume=never", "checkpoint.overwrite=true"].map(str::to_owned));
    }
    let resolved = args.config.load(&overrides)?;
    let config = &resolved.value;
    let folder = config.run.folder();
    let manager = start::for_run(&config.distributed, &folder)?;
    agree(&resolved, &manager.group(None)?, &PER_RANK_KEYS)?;
    config.check()?;
    let findings = check::before(&manager, &config.distributed, &folder)?;
    let (claimed, checkpoint) = run::claim(&manager.group(None)?, &folder, &config.checkpoint)?;
    logging::init(&config.distributed.log, manager.rank(), Some(&folder.join("logs")))?;
    tracing::info!("{manager}");
    check::warn(&manager, &findings);
    if manager.rank() == 0 {
        unused(config, manager.world_size()).iter().for_each(|warning| tracing::warn!("{warning}"));
    }
    tracing::info!("configuration {}", args.config.file().display());
    if config.train.deterministic {
        isobar_torch::guard::set_deterministic(true)?;
    }
    if checkpoint.resume != config.checkpoint.resume && manager.rank() == 0 {
        tracing::info!("this job is started again: the run resumes from its last checkpoint, if it has one");
    }
    let progress = args.progress.map_or(ProgressMode::Auto, Into::into);
    let stopped = train(&manager, &resolved, Arc::new(claimed), checkpoint, progress)?;
    DistributedManager::cleanup(true)?;
    match stopped {
        None => return Ok(Exit::Good),
        Some(Stop::Requeue) if manager.rank() == 0 => requeue()?,
        Some(Stop::Requeue | Stop::Requested) => {}
    }
    Ok(Exit::Stopped)
}

/// SLURM's variable with the number of the job.
const JOB: &str = "SLURM_JOB_ID";

/// Signals that request a checkpoint: SIGUSR1, and SIGTERM and SIGINT while no rank is lost. (After a loss,
/// mpirun sends SIGTERM to the remaining ranks.)
fn signals(manager: &DistributedManager, config: &Config) -> Result<Signals> {
    if config.checkpoint.requeue && config.checkpoint.resume == Resume::Never {
        bail!(Exit::Usage.because(
            "checkpoint.requeue is on and checkpoint.resume is \"never\": the job that is queued again would not resume its \
             checkpoint; give --resume, or --set checkpoint.resume=auto"
        ));
    }
    let under_slurm = std::env::var_os(JOB).is_some();
    if config.checkpoint.requeue && !under_slurm {
        tracing::warn!(
            "checkpoint.requeue is of no use here: {JOB} is not set, so this is no job of SLURM; --set checkpoint.requeue=false"
        );
    }
    let manager = manager.clone();
    let signals = Signals::install()?.peers_alive(move || manager.peers_alive());
    Ok(signals.requeue(config.checkpoint.requeue && under_slurm))
}

/// Asks SLURM to queue this job again, which ends it.
fn requeue() -> Result<()> {
    let job = std::env::var(JOB).unwrap_or_default();
    let status = std::process::Command::new("scontrol").args(["requeue", &job]).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("`scontrol requeue {job}` ended with {status}; the checkpoint is written"),
        Err(error) => bail!("`scontrol requeue {job}` does not start: {error}; the checkpoint is written"),
    }
}

/// Trains, and says why it ended early, where it did.
fn train(
    manager: &DistributedManager,
    resolved: &Resolved<Config>,
    claimed: Arc<RunFolder>,
    checkpoint: CheckpointConfig,
    progress: ProgressMode,
) -> Result<Option<Stop>> {
    let config = &resolved.value;
    let text = resolved.to_toml_with_origins()?;
    let signals = signals(manager, config)?;
    let training = Training { manager, config, text, signals, claimed, checkpoint, progress };
    let trained = match run::with(manager, config, training) {
        // Told to stop before the first step.
        Err(error) if exit::of(&error) == Exit::Stopped => {
            if manager.rank() == 0 {
                terminal::line(&exit::text(&error));
            }
            return Ok(Some(Stop::Requested));
        }
        trained => trained?,
    };
    if manager.rank() == 0 {
        report(config, &trained);
    }
    Ok(trained.summary.stopped)
}

/// Result of a training run.
struct Trained {
    summary: Summary,
    variables: Vec<Variable>,
    /// Validation errors of the baseline, per variable.
    baseline: Vec<VariableError>,
    /// Baseline errors of rollouts, per variable.
    rollout_baseline: Vec<VariableError>,
    /// Lines of the table of metrics.
    scores: Vec<String>,
    picture: Option<PathBuf>,
    /// True if the samples are trajectories.
    has_steps: bool,
}

/// Trains.
struct Training<'a> {
    manager: &'a DistributedManager,
    config: &'a Config,
    text: String,
    signals: Signals,
    claimed: Arc<RunFolder>,
    checkpoint: CheckpointConfig,
    progress: ProgressMode,
}

impl Job for Training<'_> {
    type Out = Trained;
    const TRAINS: bool = true;

    fn goes_on_from(&self) -> Option<PathBuf> {
        (self.checkpoint.resume != Resume::Never).then(|| self.config.run.folder())
    }

    fn run<L, F>(self, run: Run<L, F>) -> Result<Self::Out>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let Self { manager, config, text, signals, claimed, checkpoint, progress } = self;
        let (own, at_once) = at_once(&run.layout, &run.ranks, config, run.source.most_samples())?;
        let folder = config.run.folder();
        let legend = run.source.legend(config.data.points.as_deref())?;
        let place = Place {
            window: &run.window,
            target_window: &run.target_window,
            options: (config.train.precision.kind(), run.device),
            own,
            at_once,
            keep: Some(&folder),
            checks: config.distributed.checks,
            signals: &signals,
        };
        let fields = Fields::read_alike(&run.source, &config.data, &place, &run.ranks.world)?;
        let scoring = Scoring::new(&run.source, config, &run.target_window, &run.ranks.world)?;
        let run = run.with_samples(fields, scoring, config)?;
        let TaskRun { task, source, params, buffers, regression, ranks, forcing, fixed, reader } = run;
        tracing::info!(
            parameters = params.elements(),
            train = task.train.len(),
            validation = task.validation.len(),
            "training starts"
        );
        // A rank that cannot read its samples alone tells the others.
        let left = |source: BoxError| {
            ranks.world.leave(&source.to_string());
            Error::Task { context: "the baseline", source }
        };
        let baseline = task.baseline().map_err(left)?;
        let rollout_baseline = task.rollout_baseline().map_err(left)?;
        let weighted =
            [&source.data, source.targets()].iter().any(|data| area_weights(data.dims()).is_some());
        let fit_config = FitConfig {
            folder: folder.clone(),
            claimed: Some(claimed),
            seed: config.run.seed,
            train: config.train.clone(),
            optimizer: config.optimizer.clone(),
            schedule: config.schedule.clone(),
            data_parallel: data_parallel(manager, config),
            checkpoint,
            metrics: config.metrics.clone(),
            progress,
            resolved: text,
            extra: serde_json::to_value(ModelMetadata {
                input: task.model.input.clone(),
                target: task.model.target.clone(),
                predict: config.data.predict,
                change: task.model.change.clone(),
                forcing,
                fixed,
                variables: task.model.variables.clone(),
                baseline: baseline.clone(),
            })?,
            identity: {
                let mut identity = identity(config, weighted, regression.as_ref())?;
                identity[Channels::KEY] = serde_json::to_value(Channels::of_training(&source)?)?;
                identity
            },
            task: serde_json::to_value(&config.task)?,
            data: settings(&config.data),
            signals,
            checks: config.distributed.checks,
        };
        let summary = fit(&task, &params, &buffers, &ranks, &fit_config)?;
        if let Some(account) = reader.map(|reader| reader.account()) {
            let [read, peak] = [account.read, account.peak].map(format_bytes);
            tracing::info!("{read} of data were read while they were needed, with at most {peak} in memory");
        }
        let variables = task.model.variables.clone();
        let scores = match &summary.rollout_scores[..] {
            [] => summary.scores.as_slice(),
            rollouts => rollouts,
        };
        let scores = scoring::table(scores, &task.report, &variables, config.train.weights.latitude);
        let picture = match summary.stopped {
            None => picture::draw(&task, &ranks.world, &folder, &legend)?,
            // A run that is being stopped has little time.
            Some(_) => None,
        };
        let has_steps = source.has_steps();
        Ok(Trained { summary, variables, baseline, rollout_baseline, scores, picture, has_steps })
    }
}

/// Returns the most samples that this rank reads at a time, and the most that are validated at a time, before ranks share them.
/// There are `most` samples at most.
fn at_once(layout: &impl FieldLayout, ranks: &Ranks, config: &Config, most: usize) -> Result<(usize, usize)> {
    let own = |samples: usize| -> Result<usize> { Ok(layout.own(&(0..samples).collect::<Vec<_>>())?.len()) };
    let validated = config.train.batch_size.min(most).div_ceil(ranks.data.size()).max(1);
    let pass = validated.div_ceil(config.train.accumulate.max(1));
    Ok((own(pass)?.max(own(validated)?).max(own(picture::SAMPLES)?), validated))
}

/// Returns the values that a run must share to resume a checkpoint: the meaning of its data, and its network. `weighted` is true if
/// its normalisation weights points by the area of their cells; `regression` is the first stage.
fn identity(config: &Config, weighted: bool, regression: Option<&Used>) -> Result<serde_json::Value> {
    let mut identity = run::identity(config)?;
    if let Some(regression) = regression {
        identity[Used::KEY] = serde_json::to_value(regression)?;
    }
    if weighted {
        // Earlier versions weighted all points alike.
        identity["data"]["statistics"] = "weighted by cell area".into();
    }
    if config.data.predict == Predict::Change {
        // Earlier versions divided changes by the deviation of the fields; a network cannot resume with
        // another scale.
        identity["data"]["changes"] = "divided by their root mean square".into();
    }
    Ok(identity)
}

/// Settings of the samples that change training, and are not of a run's identity.
fn settings(data: &DataConfig) -> serde_json::Value {
    let DataConfig { augment, train_steps, times, train_times, validation_times, .. } = data;
    serde_json::json!({
        "augment": augment,
        "train_steps": train_steps,
        "times": times,
        "train_times": train_times,
        "validation_times": validation_times,
    })
}

/// The settings of the section, and those that the manager has.
pub(crate) fn data_parallel(manager: &DistributedManager, config: &Config) -> DataParallelConfig {
    DataParallelConfig {
        broadcast_buffers: manager.broadcast_buffers(),
        find_unused_parameters: manager.find_unused_parameters(),
        ..config.data_parallel.clone()
    }
}

fn report(config: &Config, trained: &Trained) {
    let Trained { summary, variables, baseline, rollout_baseline, scores, picture, .. } = trained;
    terminal::line(&format!("{} steps in {:.0} s", summary.steps, summary.seconds));
    if summary.stopped.is_some() {
        terminal::line("told to stop; `--resume` goes on");
    }
    let nothing_learnt = errors::baseline_name(trained.has_steps);
    if !summary.variable_errors.is_empty() && summary.stopped.is_none() {
        let one_step = Compared { errors: &summary.variable_errors, baseline };
        terminal::line(&format!("validation {}", one_step.summary(variables, nothing_learnt)));
        one_step.table(variables).iter().for_each(|line| terminal::line(line));
    }
    if let Some(rollout) = summary.rollout_error.as_ref().filter(|_| summary.stopped.is_none()) {
        let steps = config.data.validation_steps;
        let over_steps = Compared { errors: &rollout.variables, baseline: rollout_baseline };
        terminal::line(&format!(
            "rollouts of {steps} steps: {}; error of the energy spectrum after the last {}",
            over_steps.summary(variables, nothing_learnt),
            spectra_line(variables, &rollout.spectra)
        ));
        over_steps.table(variables).iter().for_each(|line| terminal::line(line));
    }
    if summary.stopped.is_none() {
        scores.iter().for_each(|line| terminal::line(line));
    }
    if let Some(picture) = picture {
        terminal::line(&format!("picture     {}", picture.display()));
    }
    if let Some(checkpoint) = &summary.checkpoint {
        terminal::line(&format!("checkpoint  {}", checkpoint.display()));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use isobar_collectives::threads;
    use rstest::rstest;

    use super::*;

    /// Runs a body on thread ranks, each with its manager.
    fn on_ranks<T: Send>(ranks: usize, body: impl Fn(DistributedManager) -> T + Sync) -> Vec<T> {
        threads::run(ranks, Duration::from_secs(60), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            body(DistributedManager::get().unwrap())
        })
    }

    #[test]
    fn augmentation_is_a_setting_of_a_run() {
        let set = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            settings(&crate::config::load(None, &sets).unwrap().value.data)
        };
        let plain = set(&[]);
        assert_eq!((&plain["augment"], plain["times"].is_null()), (&"none".into(), true));
        assert_eq!(set(&["data.augment=square"])["augment"], "square");
        assert_ne!(set(&["data.train_steps=2"])["train_steps"], plain["train_steps"]);
    }

    /// Runs without a regression resume whatever version wrote them.
    #[test]
    fn the_regression_is_of_a_runs_identity() {
        let config = Config::default();
        let saved =
            serde_json::json!({ "checkpoint": "step_00000007", "digest": "d", "condition_on_mean": true });
        let used: Used = serde_json::from_value(saved.clone()).unwrap();
        assert_eq!(identity(&config, false, None).unwrap().get(Used::KEY), None);
        assert_eq!(identity(&config, false, Some(&used)).unwrap()[Used::KEY], saved);
    }

    #[rstest]
    fn the_managers_flags_reach_data_parallel(#[values(false, true)] on: bool) {
        on_ranks(1, |manager| {
            manager.set_broadcast_buffers(on);
            manager.set_find_unused_parameters(!on);
            let mut config = Config::default();
            config.data_parallel.bucket_mb = 0.5;
            let settings = data_parallel(&manager, &config);
            assert_eq!((settings.broadcast_buffers, settings.find_unused_parameters), (on, !on));
            assert_eq!(settings.bucket_mb, 0.5);
        });
    }
}
