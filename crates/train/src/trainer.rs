//! The engine: epochs of steps, validation, metrics, checkpoints, resumption.

use std::path::{Path, PathBuf};
use std::time::Instant;

use isobar_collectives::Group;
use isobar_collectives::flight::Phase;
use isobar_data::{Sampler, part};
use isobar_manager::DeviceMesh;
use isobar_shard::Generator;
use isobar_torch::guard::Autocast;
use serde_json::Value;
use tch::Tensor;

use crate::checkpoint::{Checkpoints, Contents, Keep, Loaded, RunState, Which};
use crate::clip::{clip_grad_norm, grad_norm};
use crate::config::{
    CheckpointConfig, DataParallelConfig, MetricsConfig, OptimizerKind, Resume, SaveMode, ScheduleKind,
    TrainConfig,
};
use crate::error::{Error, Result};
use crate::fields::MODEL_AXIS;
use crate::fully_sharded::ShardedParameters;
use crate::metrics::MetricSink;
use crate::optim::Optimizer;
use crate::parallel::Parallel;
use crate::params::Parameters;
use crate::progress::Progress;
use crate::schedule::Schedule;
use crate::task::{BoxError, RolloutError, Step, Task, share};
use crate::triggers::{Asked, Signals, Stop, Triggers};

/// How [`fit`] trains.
#[derive(Debug, Clone, Default)]
pub struct FitConfig {
    /// Where metrics and checkpoints go.
    pub folder: PathBuf,
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
    /// When to save.
    pub checkpoint: CheckpointConfig,
    /// What to record.
    pub metrics: MetricsConfig,
    /// The resolved configuration as TOML, kept in every checkpoint.
    pub resolved: String,
    /// What else a checkpoint should carry, for instance the normalizers.
    pub extra: serde_json::Value,
    /// What a run that resumes must have as it was, besides seed, samples and batch size: an object, compared key by key.
    pub identity: serde_json::Value,
    /// What asks the run for checkpoints from outside.
    pub signals: Signals,
}

/// The ranks of a run.
#[derive(Debug, Clone)]
pub struct Ranks {
    /// All of them.
    pub world: Group,
    /// Those that share the samples of a batch among them: each takes its part, with the same part of the model. A rank alone
    /// where a task's own arrays are split over ranks; each then gives the task all samples.
    pub data: Group,
    /// Those whose gradients add up to that of the loss.
    pub gradients: Group,
    /// Where parameters are split over the axis `shard` of a mesh: who brings them, and the mesh.
    pub shards: Option<(ShardedParameters, DeviceMesh)>,
}

impl Ranks {
    /// Data parallelism over all ranks.
    pub fn data_parallel(world: &Group) -> Self {
        Self { world: world.clone(), data: world.clone(), gradients: world.clone(), shards: None }
    }

    /// Fields split over a mesh of all ranks, as [`ShardedFields`](crate::ShardedFields) lays them out, and parameters whose
    /// gradients are left [pending](isobar_shard::MeshParams::pending) on it: along all of its axes but [`MODEL_AXIS`]. Does
    /// not communicate.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh.
    pub fn sharded(world: &Group, mesh: &DeviceMesh) -> Result<Self> {
        let names = mesh.names();
        let axes: Vec<usize> = (0..mesh.ndim()).filter(|&axis| names[axis] != MODEL_AXIS).collect();
        let gradients = mesh.group_along(&axes).map_err(isobar_shard::Error::from)?;
        Ok(Self { world: world.clone(), data: Group::single(), gradients, shards: None })
    }

    /// The same with parameters, their gradients and the optimizer's state in parts over the axis `shard` of the mesh: see
    /// [`FullySharded`](crate::FullySharded). The model was made with `sharded`.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh.
    pub fn fully_sharded(world: &Group, mesh: &DeviceMesh, sharded: &ShardedParameters) -> Result<Self> {
        Ok(Self { shards: Some((sharded.clone(), mesh.clone())), ..Self::sharded(world, mesh)? })
    }
}

/// What came of a run; the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps taken, those before a resumption included.
    pub steps: u64,
    /// Whole epochs taken.
    pub epochs: u64,
    /// The loss of each step of this call, over the global batch.
    pub losses: Vec<f64>,
    /// The mean over the validation samples of their errors, after the last step.
    pub validation_error: Option<f64>,
    /// The same of rollouts.
    pub rollout_error: Option<RolloutError>,
    /// The lowest validation error so far.
    pub best_error: Option<f64>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// Why it ended before its last step, where it did: there was no validation then.
    pub stopped: Option<Stop>,
    /// Seconds that this call took.
    pub seconds: f64,
}

/// Trains `task` from where its folder's checkpoints say, or from the start. Every rank calls.
///
/// The global batches, the augmentation and dropout are the same on any number of ranks, and so is the loss curve but for
/// rounding; a resumed run on the same layout repeats it bitwise.
///
/// # Errors
///
/// Whatever the task, the communication or the disk reports, and losses or gradients that are not finite. A rank that
/// fails alone tells the others, whose call then fails too.
pub fn fit(
    task: &impl Task,
    params: &Parameters,
    buffers: &[(String, Tensor)],
    ranks: &Ranks,
    config: &FitConfig,
) -> Result<Summary> {
    let result = Run::start(task, params, buffers, ranks, config).and_then(Run::go);
    if let Err(error) = &result
        && !error.is_shared()
    {
        ranks.world.leave(&error.to_string());
    }
    result
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
    params: Parameters,
    buffers: &'a [(String, Tensor)],
    ranks: &'a Ranks,
    config: &'a FitConfig,
    parallel: Parallel,
    optimizer: Box<dyn Optimizer>,
    schedule: Schedule,
    sampler: Sampler,
    checkpoints: Checkpoints,
    triggers: Triggers,
    metrics: MetricSink,
    progress: Progress,
    state: RunState,
    /// The step of the last checkpoint.
    saved: Option<u64>,
    /// Whether a checkpoint that is due waits for the end of the epoch.
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
        let train = &config.train;
        if train.validate_every == 0 {
            return Err(Error::invalid("train.validate_every", 0, "1 or more"));
        }
        let sampler =
            Sampler::new(task.train_samples(), train.batch_size, config.seed, true).map_err(|source| {
                Error::Task { context: "preparing the order of samples", source: source.into() }
            })?;
        let steps_per_epoch = sampler.batches_per_epoch() as u64;
        let schedule =
            Schedule::new(config.schedule.clone(), config.optimizer.lr(), steps_per_epoch, train.epochs)?;
        let parallel = Parallel::new(params, buffers, ranks, &config.data_parallel)?;
        let params = parallel.parameters().clone();
        let mut optimizer = config.optimizer.build(&params)?;
        let folder = config.folder.join("checkpoints");
        let keep = Keep { newest: config.checkpoint.keep, best: config.checkpoint.keep_best };
        let checkpoints = Checkpoints::new(&folder, keep, &ranks.world);
        let triggers = Triggers::new(&config.signals, config.checkpoint.every_minutes)?;
        let fresh = RunState {
            seed: config.seed,
            samples: task.train_samples() as u64,
            batch_size: train.batch_size as u64,
            identity: config.identity.clone(),
            ..Default::default()
        };
        refuse_init_that_goes(&config.checkpoint, &folder)?;
        let mut contents = Contents { params: &params, buffers, optimizer: Some(&mut *optimizer) };
        let resumed = checkpoints.resume(config.checkpoint.resume, &mut contents)?;
        if let Some(Loaded { path, state }) = &resumed {
            check_same_run(state, &fresh, path)?;
            tracing::info!(step = state.step, epoch = state.epoch, "resumed from {}", path.display());
        } else if let Some(path) = &config.checkpoint.init {
            let mut weights = Contents { params: &params, buffers, optimizer: None };
            let loaded = checkpoints.load(&Which::At(path.clone()), &mut weights)?;
            tracing::info!("weights are those of {}", loaded.path.display());
        }
        let resume_at = resumed.as_ref().map(|loaded| loaded.state.step);
        let resumed_from = resumed.as_ref().map(|loaded| loaded.path.clone());
        let state = RunState {
            config: config.resolved.clone(),
            extra: config.extra.clone(),
            ..resumed.map_or(fresh, |loaded| loaded.state)
        };
        let rank = ranks.world.rank();
        let metrics = match rank {
            0 => MetricSink::open(&config.folder, &config.metrics, &COLUMNS, resume_at)?,
            _ => MetricSink::none(),
        };
        Ok(Self {
            progress: Progress::new(rank, train.epochs, steps_per_epoch, state.step),
            summary: Summary {
                steps: state.step,
                epochs: state.epoch,
                losses: Vec::new(),
                validation_error: None,
                rollout_error: None,
                best_error: state.best,
                checkpoint: resumed_from,
                stopped: None,
                seconds: 0.0,
            },
            saved: resume_at,
            due: false,
            task,
            params,
            buffers,
            ranks,
            config,
            parallel,
            optimizer,
            schedule,
            sampler,
            checkpoints,
            triggers,
            metrics,
            state,
            began: Instant::now(),
        })
    }

    fn go(mut self) -> Result<Summary> {
        while self.state.epoch < self.config.train.epochs && !self.ends() {
            self.epoch()?;
        }
        if self.summary.stopped.is_none() {
            if self.summary.validation_error.is_none() {
                self.state.validation_error = self.validate()?;
                self.summary.validation_error = self.state.validation_error;
                self.summary.rollout_error = self.validate_rollouts()?;
            }
            if self.saved != Some(self.state.step) {
                self.save(false)?;
            }
        }
        self.checkpoints.finish()?;
        self.metrics.flush()?;
        self.progress.finish();
        self.summary.steps = self.state.step;
        self.summary.epochs = self.state.epoch;
        self.summary.best_error = self.state.best;
        self.summary.seconds = self.began.elapsed().as_secs_f64();
        Ok(self.summary)
    }

    /// What is left of the epoch under way.
    fn epoch(&mut self) -> Result<()> {
        let epoch = self.state.epoch;
        let batches = self.sampler.epoch(epoch);
        for batch in &batches[(self.state.batch as usize).min(batches.len())..] {
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
            // After the last batch of an epoch the checkpoint is that of the epoch.
            if self.due && (self.state.batch as usize) < batches.len() {
                self.save(false)?;
            }
        }
        let loss = self.state.loss_sum / self.state.loss_samples as f64;
        let last = epoch + 1 == self.config.train.epochs;
        let validate = last || (epoch + 1).is_multiple_of(self.config.train.validate_every);
        let error = if validate { self.validate()? } else { None };
        let rollout = if validate { self.validate_rollouts()? } else { None };
        self.state.validation_error = error;
        self.state.epoch += 1;
        self.state.batch = 0;
        self.state.loss_sum = 0.0;
        self.state.loss_samples = 0;
        self.report(epoch, loss, error, rollout)?;
        let better =
            error.is_some_and(|error| error.is_finite() && self.state.best.is_none_or(|best| error < best));
        if better {
            self.state.best = error;
        }
        let CheckpointConfig { every_epochs: every, keep_best, .. } = self.config.checkpoint;
        let due = self.due || (every > 0 && self.state.epoch.is_multiple_of(every));
        if due || last || (better && keep_best > 0) {
            self.save(false)?;
        }
        Ok(())
    }

    /// A step, and what all ranks together are asked for.
    fn step(&mut self, epoch: u64, batch: &[usize]) -> Result<Asked> {
        self.mark(Phase::Data);
        let data = &self.ranks.data;
        let samples = part(batch, data.rank(), data.size());
        let (local, global) = (samples.len() as u64, batch.len() as u64);
        // Of the seed and the step alone, so that ranks without samples, which draw nothing, stay in step.
        let generator = Generator::new(self.state.seed).fork("train").fork(&self.state.step.to_string());
        self.parallel.zero_grad()?;
        self.parallel.sync_buffers()?;
        self.mark(Phase::Forward);
        let loss = match local {
            0 => None,
            _ => {
                let offset = share(batch.len(), data.rank(), data.size()).start as i64;
                let step = Step { epoch, offset, total: global as i64, generator: &generator };
                let precision = self.precision()?;
                let loss = self.task.loss(step, samples);
                drop(precision);
                Some(loss.map_err(|source| Error::Task { context: "the loss of a step", source })?)
            }
        };
        self.mark(Phase::Backward);
        self.parallel.backward(loss.as_ref(), local, global)?;
        self.mark(Phase::Optimizer);
        let norm = match self.config.train.clip_norm {
            Some(limit) => clip_grad_norm(&self.params, limit)?,
            None => grad_norm(&self.params)?,
        };
        let lr = self.schedule.lr(self.state.step);
        self.optimizer.step(lr)?;

        let (loss, asked) = self.global_mean(loss.as_ref(), local, global)?;
        self.checkpoints.poll();
        self.state.validation_error = None;
        self.state.step += 1;
        self.state.batch += 1;
        self.state.loss_sum += loss * global as f64;
        self.state.loss_samples += global;
        self.summary.losses.push(loss);
        self.progress.step(epoch, loss, global);
        let every = self.config.metrics.every_steps;
        if every > 0 && self.state.step.is_multiple_of(every) {
            let rate = self.progress.rate();
            let values = [("loss", loss), ("lr", lr), ("grad_norm", norm), ("samples_per_second", rate)];
            self.metrics.log(self.state.step, epoch, &values)?;
        }
        Ok(asked)
    }

    /// The loss over the global batch, the same on every rank; and what any rank is asked for.
    fn global_mean(&self, loss: Option<&Tensor>, local: u64, global: u64) -> Result<(f64, Asked)> {
        let own = loss.map_or(Ok(0.0), |loss| loss.f_double_value(&[]));
        let own = own.map_err(|source| Error::Tensor { context: "reading the loss".to_owned(), source })?;
        let (sum, asked) = self.triggers.join(&self.ranks.world, &self.ranks.data, own * local as f64)?;
        let mean = sum / global as f64;
        match mean.is_finite() {
            true => Ok((mean, asked)),
            false => Err(Error::NonFiniteLoss { value: mean, step: self.state.step }),
        }
    }

    /// The mean of the validation samples' errors, over all ranks.
    fn validate(&self) -> Result<Option<f64>> {
        let [error] = self.means(self.task.validation_samples(), |samples| {
            Ok(self.task.errors(samples)?.into_iter().map(|error| [error]).collect())
        })?;
        Ok(error)
    }

    /// The mean of the rollouts' errors, over all ranks.
    fn validate_rollouts(&self) -> Result<Option<RolloutError>> {
        let [error, spectrum] = self.means(self.task.rollouts(), |rollouts| {
            let errors = self.task.rollout_errors(rollouts)?;
            Ok(errors.into_iter().map(|of| [of.error, of.spectrum]).collect())
        })?;
        Ok(error.zip(spectrum).map(|(error, spectrum)| RolloutError { error, spectrum }))
    }

    /// The means of so many samples' numbers, over all ranks; nothing of no samples.
    fn means<const N: usize>(
        &self,
        count: usize,
        numbers: impl Fn(&[usize]) -> Result<Vec<[f64; N]>, BoxError>,
    ) -> Result<[Option<f64>; N]> {
        if count == 0 {
            return Ok([None; N]);
        }
        self.mark(Phase::Validation);
        let data = &self.ranks.data;
        let own: Vec<usize> = share(count, data.rank(), data.size()).collect();
        let at_once = self.config.train.batch_size.div_ceil(data.size()).max(1);
        let mut sums = [0.0; N];
        let _no_grad = tch::no_grad_guard();
        let _precision = self.precision()?;
        for samples in own.chunks(at_once) {
            let all = numbers(samples).map_err(|source| Error::Task { context: "validation", source })?;
            for sample in all {
                sums.iter_mut().zip(sample).for_each(|(sum, number)| *sum += number);
            }
        }
        let mut means = [None; N];
        for (mean, sum) in means.iter_mut().zip(sums) {
            *mean = Some(sum_over(data, sum)? / count as f64);
        }
        Ok(means)
    }

    fn report(
        &mut self,
        epoch: u64,
        loss: f64,
        error: Option<f64>,
        rollout: Option<RolloutError>,
    ) -> Result<()> {
        let mut values = vec![("epoch_loss", loss)];
        let mut line = format!("loss {loss:.4e}");
        if let Some(error) = error {
            self.summary.validation_error = Some(error);
            values.push(("validation_error", error));
            line.push_str(&format!("  validation error {:.2} %", error * 100.0));
        }
        if let Some(RolloutError { error, spectrum }) = rollout {
            self.summary.rollout_error = rollout;
            values.extend([("rollout_error", error), ("spectrum_error", spectrum)]);
            line.push_str(&format!("  rollout {:.2} %, spectrum {:.2} %", error * 100.0, spectrum * 100.0));
        }
        self.progress.epoch_end(epoch, &line);
        self.metrics.log(self.state.step, epoch, &values)?;
        self.metrics.flush()
    }

    /// A checkpoint; with `wait` on disk when it returns, whatever the configuration says.
    fn save(&mut self, wait: bool) -> Result<()> {
        self.mark(Phase::Checkpoint);
        self.metrics.flush()?;
        let contents =
            Contents { params: &self.params, buffers: self.buffers, optimizer: Some(&mut *self.optimizer) };
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

    /// Says what this rank is doing, for reports and records.
    fn mark(&self, phase: Phase) {
        self.ranks.world.mark(phase, self.state.step);
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

/// A sum in rank order: the same to the last bit on every rank.
fn sum_over(group: &Group, value: f64) -> Result<f64> {
    if group.size() == 1 {
        return Ok(value);
    }
    let all = group.all_gather_bytes(&value.to_le_bytes())?;
    Ok(all.iter().filter_map(|bytes| Some(f64::from_le_bytes(bytes[..].try_into().ok()?))).sum())
}

/// Refuses to go on with another run: with other global batches than those so far, of which some would be left out or
/// repeated, or with other fields or another model.
fn check_same_run(saved: &RunState, now: &RunState, path: &Path) -> Result<()> {
    let mut found = Vec::new();
    let pairs = [
        ("seed", saved.seed, now.seed),
        ("train.batch_size", saved.batch_size, now.batch_size),
        ("a number of training samples of", saved.samples, now.samples),
    ];
    for (what, saved, now) in pairs.into_iter().filter(|(_, saved, now)| saved != now) {
        found.push(format!("{what} {saved}, this run has {now}"));
    }
    differences("identity", &saved.identity, &now.identity, &mut found);
    if found.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "it was trained with {}; give the same, or start anew (another run.name, or checkpoint.resume = \"never\")",
        found.join("; with ")
    );
    Err(Error::CheckpointUnfit { path: path.to_owned(), reason })
}

/// Where two values differ, key by key.
fn differences(key: &str, saved: &Value, now: &Value, found: &mut Vec<String>) {
    match (saved, now) {
        (Value::Object(a), Value::Object(b)) => {
            let more = b.keys().filter(|name| !a.contains_key(*name));
            for name in a.keys().chain(more) {
                // What it is all called is said only where one side has nothing.
                let inner = if key == "identity" { name.clone() } else { format!("{key}.{name}") };
                let of =
                    |object: &serde_json::Map<String, Value>| object.get(name).cloned().unwrap_or_default();
                differences(&inner, &of(a), &of(b), found);
            }
        }
        _ if saved == now => {}
        _ => found.push(format!("{key} {saved}, this run has {now}")),
    }
}

/// Refuses to start from weights that are removed before they are read.
fn refuse_init_that_goes(config: &CheckpointConfig, folder: &Path) -> Result<()> {
    let (Resume::Never, Some(init)) = (config.resume, &config.init) else { return Ok(()) };
    let inside = match (init.canonicalize(), folder.canonicalize()) {
        (Ok(init), Ok(folder)) => init.starts_with(folder),
        _ => false,
    };
    match inside {
        false => Ok(()),
        true => Err(Error::invalid(
            "checkpoint.init",
            format!("{}, in the folder of this run", init.display()),
            "a place elsewhere, as checkpoint.resume = \"never\" removes the checkpoints of that folder; copy it, or give the \
             run another name",
        )),
    }
}
