//! `isobar train`: a configuration becomes ranks, data, a model and a run.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, ValueEnum};
use isobar_manager::config::Resolved;
use isobar_manager::{DistributedManager, logging};
use isobar_train::config::{DataFormat, Predict};
use isobar_train::{
    BoxError, DataParallelConfig, FieldLayout, FieldModel, FieldTask, FitConfig, RolloutError, Step, Summary,
    fit,
};

use crate::config::{Config, ConfigArgs};
use crate::exit::Exit;
use crate::run::{self, Fields, Job, Meaning, RANKS_OWN, Run, picture};
use crate::{start, terminal};

/// What `isobar train` takes.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Go on from the latest checkpoint of the run; `must` is an error where there is none
    #[arg(long, value_enum, value_name = "HOW", num_args = 0..=1, default_missing_value = "auto", require_equals = true)]
    resume: Option<ResumeArg>,
}

/// What to do where the run has checkpoints; without it what the configuration says.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ResumeArg {
    /// Go on from the latest; start anew where there is none
    Auto,
    /// Go on from the latest; fail where there is none
    Must,
    /// Start anew
    Never,
}

/// Runs the command.
pub(crate) fn command(args: &TrainArgs) -> Result<Exit> {
    let resume = args.resume.and_then(|resume| resume.to_possible_value());
    let overrides: Vec<String> =
        resume.iter().map(|how| format!("checkpoint.resume={}", how.get_name())).collect();
    let resolved = args.config.load(&overrides)?;
    let config = &resolved.value;
    let manager = start::with(&config.distributed)?;
    logging::init(&config.distributed.log, manager.rank(), Some(&config.run.folder().join("logs")))?;
    tracing::info!("{manager}");
    tracing::info!("configuration {}", args.config.file().display());
    train(&manager, &resolved)?;
    DistributedManager::cleanup(true)?;
    Ok(Exit::Good)
}

fn train(manager: &DistributedManager, resolved: &Resolved<Config>) -> Result<()> {
    resolved.agree(&manager.group(None)?, &RANKS_OWN)?;
    let config = &resolved.value;
    let text = resolved.to_toml_with_origins()?;
    let (summary, baseline, picture) = run::with(manager, config, Training { manager, config, text })?;
    if manager.rank() == 0 {
        report(config, &summary, baseline, picture.as_deref());
    }
    Ok(())
}

/// Training, which gives what came of it, the error of a model that has learnt nothing, and a picture.
struct Training<'a> {
    manager: &'a DistributedManager,
    config: &'a Config,
    text: String,
}

impl Job for Training<'_> {
    type Out = (Summary, Option<f64>, Option<PathBuf>);
    const TRAINS: bool = true;

    fn run<L, F>(self, run: Run<L, F>) -> Result<Self::Out>
    where
        L: FieldLayout,
        F: Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>,
    {
        let Self { manager, config, text } = self;
        let Run { source, layout, window, positions, forward, params, buffers, ranks, device } = run;
        let fields = Fields::read_alike(&source, &config.data, &window, device, &ranks.world)?;
        let (input, target) = (fields.input, fields.target);
        let residual = config.data.predict == Predict::Change;
        let task = FieldTask {
            model: FieldModel { forward, layout, positions, residual, input, target },
            train: fields.train,
            validation: fields.validation,
            rollouts: fields.rollouts,
            augment: config.data.augment.into(),
            loss: config.train.loss,
            seed: config.run.seed,
        };
        let folder = config.run.folder();
        if manager.rank() == 0 {
            keep(&folder, &text)?;
        }
        tracing::info!(
            parameters = params.elements(),
            train = task.train.len(),
            validation = task.validation.len(),
            "training starts"
        );
        let fit_config = FitConfig {
            folder: folder.clone(),
            seed: config.run.seed,
            train: config.train.clone(),
            optimizer: config.optimizer.clone(),
            schedule: config.schedule.clone(),
            data_parallel: data_parallel(manager, config),
            checkpoint: config.checkpoint.clone(),
            metrics: config.metrics.clone(),
            resolved: text,
            extra: serde_json::to_value(Meaning {
                input: task.model.input.clone(),
                target: task.model.target.clone(),
                fields: config.data.fields.clone(),
                predict: config.data.predict,
                positions: config.data.positions,
            })?,
        };
        let summary = fit(&task, &params, &buffers, &ranks, &fit_config)?;
        let picture = picture::draw(&task, &ranks.world, &folder)?;
        let baseline = (!task.validation.is_empty()).then(|| task.baseline_error()).transpose();
        Ok((summary, baseline.map_err(anyhow::Error::from_boxed)?, picture))
    }
}

/// The settings of the section, and those that the manager has.
fn data_parallel(manager: &DistributedManager, config: &Config) -> DataParallelConfig {
    DataParallelConfig {
        broadcast_buffers: manager.broadcast_buffers(),
        find_unused_parameters: manager.find_unused_parameters(),
        ..config.data_parallel.clone()
    }
}

/// Leaves the resolved configuration beside the run.
fn keep(folder: &Path, text: &str) -> Result<()> {
    let file = folder.join("config.toml");
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&file, text));
    written.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", file.display())).into())
}

fn report(config: &Config, summary: &Summary, baseline: Option<f64>, picture: Option<&Path>) {
    let percent = |error: f64| format!("{:.2} %", error * 100.0);
    terminal::line(&format!("{} steps in {:.0} s", summary.steps, summary.seconds));
    if let (Some(error), Some(baseline)) = (summary.validation_error, baseline) {
        let nothing_learnt = match config.data.format {
            DataFormat::Darcy => "predicting the mean field",
            DataFormat::TheWell => "predicting no change",
        };
        terminal::line(&format!(
            "validation relative L2 error {}; {nothing_learnt} gives {}",
            percent(error),
            percent(baseline)
        ));
    }
    if let Some(RolloutError { error, spectrum }) = summary.rollout_error {
        terminal::line(&format!(
            "rollouts of {} steps: relative L2 error {}, of the energy spectrum after the last {}",
            config.data.validation_steps,
            percent(error),
            percent(spectrum)
        ));
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

    /// What a body finds on ranks that are threads, each with its manager.
    fn on_ranks<T: Send>(ranks: usize, body: impl Fn(DistributedManager) -> T + Sync) -> Vec<T> {
        threads::run(ranks, Duration::from_secs(60), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            body(DistributedManager::get().unwrap())
        })
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
