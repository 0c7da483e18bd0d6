//! The configuration of a run, and `isobar config`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Subcommand};
use isobar_manager::config::{self, DistributedConfig, Resolved, Sources, reference_toml};
use isobar_train::FitConfig;
use isobar_train::config::{
    CheckpointConfig, DataConfig, DataParallelConfig, MetricsConfig, ModelConfig, OptimizerKind, RunConfig,
    ScheduleKind, TrainConfig,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::exit::Exit;
use crate::terminal;

/// Configuration of `isobar train`: every key, its default and its meaning.
///
/// Defaults < files < environment (ISOBAR_TRAIN__EPOCHS=3) < command line (--set train.epochs=3).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// The run's name, folder and seed.
    pub run: RunConfig,
    /// The samples.
    pub data: DataConfig,
    /// The network.
    pub model: ModelConfig,
    /// The loop.
    pub train: TrainConfig,
    /// What turns gradients into new parameters.
    pub optimizer: OptimizerKind,
    /// The learning rate over time.
    pub schedule: ScheduleKind,
    /// Gradients over ranks.
    pub data_parallel: DataParallelConfig,
    /// When to save, and whether to go on from what was saved.
    pub checkpoint: CheckpointConfig,
    /// What to record.
    pub metrics: MetricsConfig,
    /// How ranks find each other and what they are arranged in.
    pub distributed: DistributedConfig,
}

impl Config {
    /// Checks the settings of a training run that need no data, model or ranks.
    pub(crate) fn check(&self) -> Result<()> {
        let settings = FitConfig {
            train: self.train.clone(),
            optimizer: self.optimizer.clone(),
            schedule: self.schedule.clone(),
            data_parallel: self.data_parallel.clone(),
            checkpoint: self.checkpoint.clone(),
            ..FitConfig::default()
        };
        Ok(settings.check()?)
    }
}

/// Where a configuration comes from, on the command line.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// A TOML file; see `isobar config reference` for its keys
    #[arg(value_name = "CONFIG")]
    file: PathBuf,
    /// Set a key, whatever the file says; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// What `isobar config` does.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print the configuration that a run would have, with the origin of each value
    Show(ConfigArgs),
    /// Print every key with its default and its meaning
    Reference,
}

impl ConfigArgs {
    /// Loads it, with `overrides` above everything else.
    pub(crate) fn load(&self, overrides: &[String]) -> Result<Resolved<Config>> {
        load(Some(&self.file), self.set.iter().chain(overrides))
    }

    /// The file.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }
}

/// The configuration of a file, or without one, with `sets` above everything else.
pub(crate) fn load<'a>(
    file: Option<&Path>,
    sets: impl IntoIterator<Item = &'a String>,
) -> Result<Resolved<Config>> {
    let mut sources = Sources::from_process();
    if let Some(file) = file {
        sources = sources.file(file);
    }
    let sources = sets.into_iter().fold(sources, |sources, set| sources.set(set));
    let resolved: Resolved<Config> = config::load(&sources)?;
    resolved.value.run.check()?;
    Ok(resolved)
}

/// Runs the command.
pub(crate) fn run(command: &ConfigCommand) -> Result<Exit> {
    let text = match command {
        ConfigCommand::Show(args) => args.load(&[])?.to_toml_with_origins()?,
        ConfigCommand::Reference => reference_toml::<Config>()?,
    };
    terminal::line(text.trim_end());
    Ok(Exit::Good)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configs() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")
    }

    #[test]
    fn the_reference_is_what_the_code_says() {
        let file = std::fs::read_to_string(configs().join("reference.toml")).unwrap();
        assert!(
            file == reference_toml::<Config>().unwrap(),
            "configs/reference.toml is out of date; run `cargo run --release -p isobar -- config reference > \
             configs/reference.toml`"
        );
    }

    #[test]
    fn every_configuration_loads() {
        for entry in std::fs::read_dir(configs()).unwrap() {
            let path = entry.unwrap().path();
            let resolved = config::load::<Config>(&Sources::default().file(&path)).unwrap();
            if path.ends_with("reference.toml") {
                assert_eq!(resolved.value, Config::default());
            }
        }
    }
}
