//! The engine: epochs of steps, validation, metrics, checkpoints, resumption.
//!
//! It runs any [`Task`](crate::Task), and depends on no model, data format or loss.

mod best;
mod disk;
mod memory;
mod passes;
mod planned;
mod same_run;
mod settings;
mod step;
mod validation;
mod warnings;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use isobar_collectives::flight::Phase;
use isobar_collectives::{BackendKind, Group};
use isobar_data::Sampler;
use isobar_manager::DistributedManager;
use isobar_manager::config::CheckChoice;
use isobar_manager::logging::{Shown, show_where_nobody_does};
use isobar_torch::guard::{Autocast, set_deterministic};
use tch::Tensor;

pub use self::planned::{StepPlan, plan_step};

use self::best::{Best, RELATIVE};
use self::same_run::{check_counts, check_same_run};
use self::validation::{Validation, metric_columns};
use self::warnings::Extent;
use crate::agree::{agree, same_settings};
use crate::checkpoint::{CheckpointSelector, Checkpoints, Contents, Keep, Loaded, RunState};
use crate::config::{
    CheckpointConfig, DataParallelConfig, MetricsConfig, OptimizerKind, Precision, Resume, SaveMode,
    ScheduleKind, TrainConfig,
};
use crate::error::{Error, Result};
use crate::folders::CHECKPOINTS;
use crate::loss_scale::LossScale;
use crate::metric::Scores;
use crate::metrics::MetricSink;
use crate::optim::Averaged;
use crate::out_of_memory::{self, NamedTensors};
use crate::parallel::Parallel;
use crate::params::Parameters;
use crate::progress::{Progress, ProgressMode, ProgressPlan};
use crate::ranks::Ranks;
use crate::run_folder::{RunFolder, Unsaved};
use crate::schedule::Schedule;
use crate::stragglers::{Straggler, Stragglers};
use crate::task::{RolloutError, Task};
use crate::triggers::{Signals, Stop, Triggers};
use crate::variables::{self, Variable, VariableError};

/// Options of [`fit`].
#[derive(Debug, Clone, Default)]
pub struct FitConfig {
    /// Folder of the run's metrics and checkpoints. It belongs to one run at a time: see [`RunFolder`].
    pub folder: PathBuf,
    /// Folder that the caller has already claimed; otherwise [`fit`] claims it while it trains.
    pub claimed: Option<Arc<RunFolder>>,
    /// Seed of sample order and dropout.
    pub seed: u64,
    /// The loop.
    pub train: TrainConfig,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// The learning rate over time.
    pub schedule: ScheduleKind,
    /// Gradients over ranks.
    pub data_parallel: DataParallelConfig,
    /// Saving of checkpoints.
    pub checkpoint: CheckpointConfig,
    /// Metrics to record.
    pub metrics: MetricsConfig,
    /// Display of progress.
    pub progress: ProgressMode,
    /// The resolved configuration as TOML, kept in every checkpoint and, unless it is empty, in `config.toml` in the folder.
    pub resolved: String,
    /// Other values that a checkpoint should carry. A resumed run must have the checkpoint's normalizers `input`, `target`,
    /// `change`, `forcing` and `fixed`, as far as both have them. `baseline` holds the errors of a prediction without a network:
    /// if it differs, the validation data are others, and the lowest validation error is discarded.
    pub extra: serde_json::Value,
    /// Values that a resumed run must share, besides seed, samples and batch size: an object, compared key by key. The keys
    /// `channels` and `model` are ignored if the checkpoint lacks them.
    pub identity: serde_json::Value,
    /// Settings of the task. A run that resumes with others, like one with another loss, continues with a warning.
    pub task: serde_json::Value,
    /// Settings of the samples that change training, but not the meaning of the data, such as augmentation. A run that resumes with
    /// others continues with a warning.
    pub data: serde_json::Value,
    /// External requests for checkpoints.
    pub signals: Signals,
    /// Reaction to a disk without room for checkpoints, and to hosts without memory for gradients and the optimizer's state.
    pub checks: CheckChoice,
}

/// Result of a run; the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps taken, those before a resumption included.
    pub steps: u64,
    /// Whole epochs taken.
    pub epochs: u64,
    /// The loss of each step of this call, over the global batch.
    pub losses: Vec<f64>,
    /// The validation error after the last step: the mean of the relative errors over variables and
    /// validation samples.
    pub validation_error: Option<f64>,
    /// Errors of each variable over the validation samples; empty where there are none.
    pub variable_errors: Vec<VariableError>,
    /// Errors of rollouts.
    pub rollout_error: Option<RolloutError>,
    /// Metrics of the validation samples, one step ahead, if some are reported.
    pub scores: Option<Scores>,
    /// Metrics of the rollouts, after each step.
    pub rollout_scores: Vec<Scores>,
    /// The lowest validation error so far, or the lowest cost of the metric of `train.best`.
    pub best_error: Option<f64>,
    /// The last rank for which the others waited, where there was one. It depends on the machines.
    pub straggler: Option<Straggler>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// Reason why it ended before its last step, if it did: there was no validation then.
    pub stopped: Option<Stop>,
    /// Seconds that this call took.
    pub seconds: f64,
}

/// Trains `task` from where its folder's checkpoints say, or from the start. Every rank calls.
///
/// The folder is locked during training; results of another run in it are an error unless `config.checkpoint`
/// resumes or overwrites them.
///
/// The global batches, the augmentation and dropout are the same on any number of ranks, and so is the loss curve but for
/// rounding; a resumed run on the same layout and processor repeats it bitwise. Deterministic kernels, where they are asked for, are the
/// process's from then on.
///
/// Before the first step it compares what backward leaves in the gradients of the parameters ([`Parameter::source`](crate::Parameter::source)) with the ranks that
/// share samples, those over which gradients are summed and the [mesh](Task::mesh) of the fields.
///
/// At the end it warns of variables that are predicted no better than by the task's [baseline](Task::baseline_errors).
///
/// If the program has not set up logging, messages are shown on the terminal of rank 0, like the default of
/// [`logging::init`](isobar_manager::logging::init).
///
/// # Errors
///
/// [`Error::WrongGradients`] on all ranks if the gradients would not be those of the loss; it names the
/// correct call.
/// Whatever the task, the communication or the disk reports, and losses or gradients that are not finite. A rank that
/// fails alone tells the others, whose call then fails too.
pub fn fit(
    task: &impl Task,
    params: &Parameters,
    buffers: &[(String, Tensor)],
    ranks: &Ranks,
    config: &FitConfig,
) -> Result<Summary> {
    let world = &ranks.world;
    let _shown = shown(world);
    let (result, _run) = match Run::start(task, params, buffers, ranks, config) {
        Ok(mut run) => (run.go(), Some(run)),
        Err(error) => {
            let held = NamedTensors { params, buffers, optimizer: None };
            (Err(out_of_memory::explained(error, world, &held)), None)
        }
    };
    // Before the run is dropped, which waits for a checkpoint under way: the others do not.
    if let Err(error) = &result
        && !error.is_shared()
    {
        world.leave(&error.to_string());
    }
    result
}

/// Shows messages during a run on the program's first rank, if logging has not been set up.
fn shown(world: &Group) -> Option<Shown> {
    let threads = world.backend() == BackendKind::Threads;
    let rank = DistributedManager::get().map_or(world.rank(), |manager| manager.rank());
    (!threads).then(|| show_where_nobody_does(rank)).flatten()
}

/// The metrics that a run records.
const COLUMNS: [&str; 8] = [
    "loss",
    "lr",
    "grad_norm",
    "samples_per_second",
    "epoch_loss",
    "validation_error",
    "rollout_error",
    "spectrum_error",
];

struct Run<'a, T> {
    task: &'a T,
    /// Parameters that the optimizer steps: full ones, or this rank's shards.
    params: Parameters,
    /// Parameters that the model uses.
    whole: Parameters,
    buffers: &'a [(String, Tensor)],
    ranks: &'a Ranks,
    config: &'a FitConfig,
    parallel: Parallel,
    optimizer: Averaged,
    schedule: Schedule,
    sampler: Sampler,
    checkpoints: Checkpoints,
    triggers: Triggers,
    stragglers: Stragglers,
    metrics: MetricSink,
    /// Error of a record that could not be written, until the ranks agree to end.
    unrecorded: Option<Error>,
    /// Results of an earlier run, which the first checkpoint replaces. Dropped after everything that writes
    /// to the folder, and before its lock.
    _unsaved: Option<Arc<Unsaved>>,
    folder: Arc<RunFolder>,
    progress: Progress,
    /// Variables for which errors are reported.
    variables: Vec<Variable>,
    /// Metric by which checkpoints are compared; `None` for the mean of relative errors.
    best: Option<Best>,
    state: RunState,
    /// The step of the last checkpoint.
    saved: Option<u64>,
    /// Step of the last validation.
    validated_at: Option<u64>,
    /// True if a checkpoint that is due waits for the end of the epoch.
    due: bool,
    summary: Summary,
    began: Instant,
}

impl<'a, T: Task> Run<'a, T> {
    fn start(
        task: &'a T,
        params: &Parameters,
        buffers: &'a [(String, Tensor)],
        ranks: &'a Ranks,
        config: &'a FitConfig,
    ) -> Result<Self> {
        ranks.world.mark(Phase::Start, 0);
        agree(&ranks.world, config.check())?;
        same_settings(&ranks.world, &config.shared())?;
        let folder = match &config.claimed {
            Some(claimed) => claimed.clone(),
            None => Arc::new(RunFolder::claim(&config.folder, &ranks.world, Duration::ZERO)?),
        };
        folder.log_state();
        folder.check(&config.checkpoint, &ranks.world)?;
        let train = &config.train;
        let settings = warnings::settings(config);
        let sampler =
            Sampler::new(task.train_samples(), train.batch_size, config.seed, true).map_err(|source| {
                Error::Task { context: "preparing the order of samples", source: source.into() }
            })?;
        let steps_per_epoch = sampler.batches_per_epoch() as u64;
        let schedule =
            Schedule::new(config.schedule.clone(), config.optimizer.lr(), steps_per_epoch, train.epochs)?;
        if train.deterministic {
            set_deterministic(true)?;
        }
        memory::check(params, ranks, config)?;
        let parallel = Parallel::new(params, buffers, (ranks, task.mesh()), &config.data_parallel)?;
        let whole = params.clone();
        let params = parallel.parameters().clone();
        let mut optimizer = Averaged::new(config.optimizer.build(&params)?, &params, &train.averages())?;
        let keep = Keep { newest: config.checkpoint.keep, best: config.checkpoint.keep_best };
        let mut checkpoints = Checkpoints::new(&config.folder.join(CHECKPOINTS), keep, &ranks.world);
        let triggers = Triggers::new(&config.signals, config.checkpoint.every_minutes)?;
        let fresh = RunState {
            seed: config.seed,
            samples: task.train_samples() as u64,
            batch_size: train.batch_size as u64,
            identity: config.identity.clone(),
            extra: config.extra.clone(),
            settings: settings.clone(),
            loss_scale: scaled(train.precision),
            ..Default::default()
        };
        let mut contents = Contents { params: &params, buffers, optimizer: Some(&mut optimizer) };
        let resumed = load(&checkpoints, &mut contents, (&fresh, steps_per_epoch), (ranks, config))?;
        warn_of_settings(task, buffers, (ranks, config), (&settings, resumed.as_ref()));
        // A run that is finished keeps the configuration that it was trained with.
        let finished = resumed.as_ref().is_some_and(|loaded| warnings::is_finished(&loaded.state, config));
        if !finished {
            disk::check(&ranks.world, &params, buffers, config)?;
        }
        let resume_at = resumed.as_ref().map(|loaded| loaded.state.step);
        let resumed_from = resumed.as_ref().map(|loaded| loaded.path.clone());
        let state = resumed.map_or_else(|| fresh.clone(), |loaded| loaded.state);
        let variables = named(task.variables(), &ranks.world);
        let best_metric = Best::find(&train.best, task.metrics(), &variables)?;
        let metric = match train.best.as_str() {
            RELATIVE => variables::metric(variables.len()),
            best => Some(best.to_owned()),
        };
        let state = continued(state, &fresh, metric, &config.resolved);
        let rank = ranks.world.rank();
        // Weights to start from may have been in the folder; they have been loaded by now.
        let unsaved = match resume_at {
            None => folder.begin(&config.checkpoint, &ranks.world)?.map(Arc::new),
            Some(_) => None,
        };
        checkpoints.begin(unsaved.clone());
        if rank == 0 && !config.resolved.is_empty() && !finished {
            folder.write("config.toml", config.resolved.as_bytes())?;
        }
        let columns = metric_columns(&variables, task);
        let metrics = match rank {
            0 => MetricSink::open(&config.folder, &config.metrics, &columns, resume_at)?,
            _ => MetricSink::none(),
        };
        let plan = ProgressPlan {
            epochs: train.epochs,
            steps_per_epoch,
            max_steps: train.max_steps,
            done: state.step,
        };
        Ok(Self {
            progress: Progress::new(config.progress, rank, plan),
            summary: Summary {
                steps: state.step,
                epochs: state.epoch,
                losses: Vec::new(),
                validation_error: None,
                variable_errors: Vec::new(),
                rollout_error: None,
                scores: None,
                rollout_scores: Vec::new(),
                best_error: state.best,
                straggler: None,
                checkpoint: resumed_from,
                stopped: None,
                seconds: 0.0,
            },
            saved: resume_at,
            validated_at: None,
            due: false,
            task,
            params,
            whole,
            buffers,
            ranks,
            config,
            parallel,
            optimizer,
            schedule,
            sampler,
            checkpoints,
            triggers,
            stragglers: Stragglers::default(),
            metrics,
            unrecorded: None,
            _unsaved: unsaved,
            folder,
            variables,
            best: best_metric,
            state,
            began: Instant::now(),
        })
    }

    fn go(&mut self) -> Result<Summary> {
        match self.train() {
            Ok(()) => Ok(self.summary.clone()),
            Err(error) => {
                let Self { params, buffers, optimizer, ranks, .. } = self;
                let held = NamedTensors { params, buffers, optimizer: Some(optimizer) };
                Err(out_of_memory::explained(error, &ranks.world, &held))
            }
        }
    }

    fn train(&mut self) -> Result<()> {
        while self.state.epoch < self.config.train.epochs && !self.ends() {
            self.epoch()?;
        }
        if self.summary.stopped.is_none() {
            // The last steps may not have been validated yet.
            if self.validated_at != Some(self.state.step) {
                let validation = self.validated()?;
                self.improves(&validation);
                if !self.summary.losses.is_empty() {
                    self.record_validation(&validation)?;
                }
            }
            if self.saved != Some(self.state.step) {
                self.save(false)?;
            }
        }
        if self.summary.stopped.is_none() {
            // The caller gets the validated parameters.
            self.swap_averages()?;
            self.warn_of_baseline()?;
        }
        self.checkpoints.finish()?;
        self.flush()?;
        self.progress.finish();
        self.summary.steps = self.state.step;
        self.summary.epochs = self.state.epoch;
        self.summary.best_error = self.state.best;
        self.summary.seconds = self.began.elapsed().as_secs_f64();
        Ok(())
    }

    /// Trains the rest of the current epoch.
    fn epoch(&mut self) -> Result<()> {
        let epoch = self.state.epoch;
        let batches = self.sampler.epoch(epoch);
        let rest = &batches[(self.state.batch as usize).min(batches.len())..];
        self.announce(epoch, rest);
        for batch in rest {
            if self.ends() {
                return Ok(());
            }
            let asked = self.step(epoch, batch)?;
            let every = self.config.checkpoint.every_steps;
            self.due |= asked.save() || (every > 0 && self.state.step.is_multiple_of(every));
            if let Some(stop) = asked.stop() {
                tracing::info!(step = self.state.step, "told to stop: a checkpoint, then the end");
                self.save(true)?;
                self.summary.stopped = Some(stop);
                return Ok(());
            }
            // After the last batch of an epoch the checkpoint is that of the epoch; after the last step it follows the validation.
            if self.due && (self.state.batch as usize) < batches.len() && !self.ends() {
                self.save(false)?;
            }
        }
        let loss = self.state.loss_sum / self.state.loss_samples as f64;
        let last = epoch + 1 == self.config.train.epochs;
        // A run that ends here has its last validation in its last checkpoint.
        let validation =
            if self.validates(epoch) || self.ends() { self.validated()? } else { Validation::default() };
        let better = self.improves(&validation);
        self.state.epoch += 1;
        self.state.batch = 0;
        self.state.loss_sum = 0.0;
        self.state.loss_samples = 0;
        self.report(epoch, loss, &validation)?;
        self.flush()?;
        let CheckpointConfig { every_epochs: every, keep_best, .. } = self.config.checkpoint;
        let due = self.due || (every > 0 && self.state.epoch.is_multiple_of(every));
        if due || last || (better && keep_best > 0) {
            self.save(false)?;
        }
        Ok(())
    }

    /// Keeps the error of a validation; returns whether it is the lowest so far.
    fn improves(&mut self, validation: &Validation) -> bool {
        let error = validation.cost(self.best, self.task);
        self.state.validation_error = error;
        let best = self.state.best;
        let better = error.is_some_and(|error| error.is_finite() && best.is_none_or(|best| error < best));
        if better {
            self.state.best = error;
        }
        better
    }

    /// Returns whether validation follows an epoch.
    fn validates(&self, epoch: u64) -> bool {
        let next = epoch + 1;
        next == self.config.train.epochs || next.is_multiple_of(self.config.train.validate_every)
    }

    /// A checkpoint; with `wait` on disk when it returns, whatever the configuration says.
    fn save(&mut self, wait: bool) -> Result<()> {
        self.mark(Phase::Checkpoint);
        self.flush()?;
        // Several ranks write buffers, each some of them.
        self.parallel.share_buffers()?;
        let contents =
            Contents { params: &self.params, buffers: self.buffers, optimizer: Some(&mut self.optimizer) };
        let path = match self.config.checkpoint.mode {
            SaveMode::Async if !wait => self.checkpoints.save_in_background(&contents, &self.state)?,
            _ => self.checkpoints.save(&contents, &self.state)?,
        };
        self.triggers.saved();
        self.due = false;
        self.saved = Some(self.state.step);
        self.summary.checkpoint = Some(path);
        Ok(())
    }

    /// Flushes all metrics and checks that the run's folder still exists; fails on all ranks otherwise.
    fn flush(&mut self) -> Result<()> {
        let own = match self.unrecorded.take() {
            Some(error) => Err(error),
            None => self.metrics.flush(),
        };
        // A missing folder is the root cause of other errors.
        agree(&self.ranks.world, self.folder.check_in_place().and(own))
    }

    /// Records metrics. If a file cannot be written, all ranks fail at the next [`Run::flush`].
    fn record(&mut self, epoch: u64, values: &[(&str, f64)]) -> Result<()> {
        match self.metrics.log(self.state.step, epoch, values) {
            Err(error) if error.is_of_files() => {
                self.unrecorded.get_or_insert(error);
                Ok(())
            }
            logged => logged,
        }
    }

    /// Says what this rank is doing, for reports and records.
    fn mark(&self, phase: Phase) {
        self.ranks.world.mark(phase, self.state.step);
        self.progress.phase(phase);
    }

    fn precision(&self) -> Result<Option<Autocast>> {
        let device = self.params.iter().next().map_or(tch::Device::Cpu, |first| first.tensor.device());
        Ok(self.config.train.precision.enter(device)?)
    }

    fn ends(&self) -> bool {
        self.summary.stopped.is_some()
            || self.config.train.max_steps.is_some_and(|limit| self.state.step >= limit)
    }
}

/// Loads the checkpoint from which the run resumes, which must be of the same run as `fresh`, or the weights from which it starts.
/// All ranks call.
fn load(
    checkpoints: &Checkpoints,
    contents: &mut Contents<'_>,
    (fresh, steps_per_epoch): (&RunState, u64),
    (ranks, config): (&Ranks, &FitConfig),
) -> Result<Option<Loaded>> {
    let resumed = match config.checkpoint.resume {
        Resume::Never => None,
        resume => checkpoints.resume(resume, contents)?,
    };
    if let Some(Loaded { path, state, .. }) = &resumed {
        check_same_run(state, fresh, path)?;
        check_counts(state, steps_per_epoch, path)?;
        tracing::info!(step = state.step, epoch = state.epoch, "resumed from {}", path.display());
    } else if let Some(path) = &config.checkpoint.init {
        let mut weights = Contents { params: contents.params, buffers: contents.buffers, optimizer: None };
        let loaded = checkpoints.load(&CheckpointSelector::At(path.clone()), &mut weights);
        let loaded = loaded.map_err(|error| error.asked_by("checkpoint.init"))?;
        tracing::info!("weights are those of {}", loaded.path.display());
        let differences = same_run::other_channels(&loaded.state.identity, &config.identity);
        for difference in differences.iter().filter(|_| ranks.world.rank() == 0) {
            tracing::warn!("the weights of {} were trained with {difference}", loaded.path.display());
        }
    }
    Ok(resumed)
}

/// Warns, on rank 0, of settings that go badly with the task, the ranks, or the checkpoint that the run continues.
fn warn_of_settings(
    task: &impl Task,
    buffers: &[(String, Tensor)],
    (ranks, config): (&Ranks, &FitConfig),
    (settings, resumed): (&serde_json::Value, Option<&Loaded>),
) {
    let extent = Extent {
        samples: task.train_samples(),
        sharing: ranks.data.size().saturating_mul(task.sharing_ranks()),
        data: ranks.data.size(),
        norm: buffers.iter().map(|(name, _)| &name[..]).find(|name| name.ends_with("running_mean")),
    };
    let mut found = warnings::warnings(config, extent);
    found.extend(task.idle_ranks());
    if let Some(Loaded { path, state, .. }) = resumed {
        found.extend(warnings::resumed(state, config, settings, path));
    }
    if ranks.world.rank() == 0 {
        found.iter().for_each(|warning| tracing::warn!("{warning}"));
    }
}

/// The state of a run that continues from `state`, with its own settings. The lowest validation error so far counts only if it was
/// measured by the same metric on the same data.
fn continued(state: RunState, fresh: &RunState, metric: Option<String>, resolved: &str) -> RunState {
    let other_metric = state.validation_metric != metric;
    let other_data = !state.same_validation_data(fresh);
    let best = state.best.filter(|_| !other_metric && !other_data);
    if best != state.best && other_metric {
        tracing::warn!(
            "the lowest validation error so far is left out: another metric measured it, not the {}",
            metric.as_deref().unwrap_or("relative L2 error")
        );
    } else if best != state.best {
        tracing::warn!(
            "the lowest validation error so far is discarded: it was measured on other validation data"
        );
    }
    RunState {
        best,
        validation_metric: metric,
        config: resolved.to_owned(),
        settings: fresh.settings.clone(),
        extra: fresh.extra.clone(),
        // That of a run in another precision is of no use here.
        loss_scale: fresh.loss_scale.map(|fresh| state.loss_scale.unwrap_or(fresh)),
        ..state
    }
}

/// The variables under names of their own; rank 0 says which were renamed.
fn named(variables: Vec<Variable>, world: &Group) -> Vec<Variable> {
    let renamed = variables::unique_names(variables.clone());
    let changed = variables.iter().zip(&renamed).filter(|(old, new)| old.name != new.name);
    for (old, new) in changed.filter(|_| world.rank() == 0) {
        tracing::warn!("another variable is named like \"{}\": it is reported as \"{}\"", old.name, new.name);
    }
    renamed
}

/// The loss scale that a run begins with, where its precision needs one.
fn scaled(precision: Precision) -> Option<LossScale> {
    (precision == Precision::Fp16Mixed).then(LossScale::default)
}
