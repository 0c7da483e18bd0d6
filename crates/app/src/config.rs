//! The configuration of a run, and `isobar config`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use isobar_manager::config::{
    self, DistributedConfig, Resolved, Sources, reference_markdown, reference_toml,
};
use isobar_models::{FieldSpec, ModelConfig};
use isobar_train::FitConfig;
use isobar_train::config::{
    CheckpointConfig, DataConfig, DataParallelConfig, MetricsConfig, OptimizerKind, Predict, Resume,
    RunConfig, ScheduleKind, TrainConfig,
};
use isobar_train::objective::{ObjectiveKind, Setup};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use isobar_command::exit::{Because, Exit};
use isobar_command::terminal;

/// Configuration of `isobar train`: every key, its default and its meaning.
///
/// Defaults < files < environment (ISOBAR_TRAIN__EPOCHS=3) < command line (--set train.epochs=3).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// The run's name, folder and seed.
    pub run: RunConfig,
    /// Data set: files, variables, training and validation samples.
    pub data: DataConfig,
    /// The network.
    pub model: ModelConfig,
    /// Training task: loss and predictions of the network.
    #[schemars(extend("x-former-table" = "diffusion"))]
    pub task: ObjectiveKind,
    /// Training loop.
    pub train: TrainConfig,
    /// Optimizer: updates parameters from gradients.
    pub optimizer: OptimizerKind,
    /// The learning rate over time.
    pub schedule: ScheduleKind,
    /// Gradients over ranks.
    pub data_parallel: DataParallelConfig,
    /// Saving of checkpoints, and resuming from them.
    pub checkpoint: CheckpointConfig,
    /// Metrics to record.
    pub metrics: MetricsConfig,
    /// Rendezvous of the ranks, and their mesh.
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
            metrics: self.metrics.clone(),
            ..FitConfig::default()
        };
        settings.check()?;
        let CheckpointConfig { resume, overwrite, .. } = &self.checkpoint;
        if *overwrite && *resume != Resume::Never {
            bail!(Exit::Usage.because(
                "checkpoint.resume continues a run and checkpoint.overwrite replaces it, and both are set; --set \
                 checkpoint.overwrite=false, or --set checkpoint.resume=never"
            ));
        }
        self.data.check()?;
        let steps = &self.data.train_steps;
        self.train.weights.check_steps(steps.least(), steps.most())?;
        self.check_task()
    }

    /// Compares the task with the data and the model.
    pub(crate) fn check_task(&self) -> Result<()> {
        let setup = Setup {
            model: self.model.name().to_owned(),
            denoiser: self.model.denoises(),
            train_steps: self.data.train_steps.most(),
            validation_steps: self.data.validation_steps,
            changes: self.data.predict == Predict::Change,
            masks: self.data.masks().is_some(),
        };
        self.task.check(&setup).map_err(|error| Exit::Usage.because(error.to_string()).into())
    }

    /// Compares the task with the fields of the data. `has_conditions` is true if scalars are conditions of samples.
    pub(crate) fn check_fields(&self, fields: &FieldSpec, has_conditions: bool) -> Result<()> {
        let checked = self.task.check_fields(fields, has_conditions);
        checked.map_err(|error| Exit::Usage.because(error.to_string()).into())
    }

    /// Shape of the model's inputs for such data.
    pub(crate) fn fields_of_model(&self, fields: FieldSpec) -> FieldSpec {
        self.task.fields_of_network(fields, self.model.reads_patches())
    }
}

/// Configuration arguments of the command line.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// A TOML file, or the folder of a run, which holds its configuration; see `isobar config reference` for the keys
    #[arg(value_name = "CONFIG")]
    file: PathBuf,
    /// Override a key of the configuration; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Commands of `isobar config`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print the configuration that a run would have, with the origin of each value
    Show(ConfigArgs),
    /// Print every key with its default and its meaning, as TOML
    Reference {
        /// Print tables in Markdown instead
        #[arg(long)]
        markdown: bool,
    },
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

/// The configuration of a file or the folder of a run, or without one, with `sets` above everything else.
pub(crate) fn load<'a>(
    file: Option<&Path>,
    sets: impl IntoIterator<Item = &'a String>,
) -> Result<Resolved<Config>> {
    let sets: Vec<&String> = sets.into_iter().collect();
    let folder = file.filter(|path| path.is_dir());
    let resolved = match (file, folder) {
        (_, Some(folder)) => from_sources(Some(&of_run(folder)?), &sets)?,
        (file, None) => from_sources(file, &sets)?,
    };
    let Some(folder) = folder else { return Ok(resolved) };
    let here = folder.canonicalize().map_err(|error| unreadable(folder, &error))?;
    if resolved.value.run.folder().canonicalize().is_ok_and(|own| own == here) {
        return Ok(resolved);
    }
    // A run whose folder was moved or copied: its files are here.
    let (Some(output), Some(name)) = (here.parent(), here.file_name()) else { return Ok(resolved) };
    let moved = [("output", output.to_string_lossy()), ("name", name.to_string_lossy())]
        .map(|(key, value)| format!("run.{key}={}", serde_json::Value::from(value)));
    let sets: Vec<&String> = moved.iter().chain(sets).collect();
    from_sources(Some(&of_run(folder)?), &sets)
}

fn from_sources(file: Option<&Path>, sets: &[&String]) -> Result<Resolved<Config>> {
    let mut sources = Sources::from_process();
    if let Some(file) = file {
        sources = sources.file(file);
    }
    let sources = sets.iter().fold(sources, |sources, set| sources.set(set.as_str()));
    let resolved: Resolved<Config> = config::load(&sources)?;
    resolved.value.run.check()?;
    Ok(resolved)
}

/// The configuration that a run has left in its folder.
pub(crate) fn of_run(folder: &Path) -> Result<PathBuf> {
    let file = folder.join("config.toml");
    if file.is_file() {
        return Ok(file);
    }
    let runs = runs_in(folder);
    let hint = runs.first().map(|run| format!(", such as {}", run.display())).unwrap_or_default();
    let problem = if folder.exists() { "is a folder without a config.toml" } else { "does not exist" };
    Err(Exit::Usage
        .because(format!(
            "{} {problem}: expected a TOML file, or the folder of a run{hint}",
            folder.display()
        ))
        .into())
}

/// The folders of runs in a folder, by name.
pub(crate) fn runs_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut runs: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_run(path)).collect();
    runs.sort();
    runs
}

/// Returns whether a folder is that of a run.
pub(crate) fn is_run(folder: &Path) -> bool {
    folder.join("config.toml").is_file()
}

fn unreadable(folder: &Path, error: &std::io::Error) -> anyhow::Error {
    Exit::Usage.because(format!("cannot read the folder {}: {error}", folder.display())).into()
}

/// Runs the command.
pub(crate) fn run(command: &ConfigCommand) -> Result<Exit> {
    let text = match command {
        ConfigCommand::Show(args) => args.load(&[])?.to_toml_with_origins()?,
        ConfigCommand::Reference { markdown: true } => reference_markdown::<Config>()?,
        ConfigCommand::Reference { markdown: false } => reference_toml::<Config>()?,
    };
    terminal::line(text.trim_end());
    Ok(Exit::Good)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn configs() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")
    }

    #[test]
    fn references_are_what_the_code_says() {
        let file = |name: &str| std::fs::read_to_string(configs().join(name)).unwrap();
        let mend = "is out of date; run `cargo xtask reference`";
        let toml = reference_toml::<Config>().unwrap();
        assert!(file("reference.toml") == toml, "configs/reference.toml {mend}");
        let page = file("../docs/configuration.md");
        let tables = page.split_once("\n## `[").map(|(_, tables)| format!("## `[{tables}"));
        let markdown = reference_markdown::<Config>().unwrap();
        assert!(tables == Some(markdown), "docs/configuration.md {mend}");
    }

    #[test]
    fn every_configuration_loads() {
        let entries = std::fs::read_dir(configs()).unwrap().map(|entry| entry.unwrap().path());
        // Recipes of data sets are in a folder.
        for path in entries.filter(|path| path.is_file()) {
            let resolved = config::load::<Config>(&Sources::default().file(&path)).unwrap();
            if path.ends_with("reference.toml") {
                assert_eq!(resolved.value, Config::default());
            }
        }
    }

    #[rstest]
    #[case::resumed_and_replaced(&["checkpoint.resume=auto", "checkpoint.overwrite=true"], "--set checkpoint.overwrite=false")]
    #[case::path(&["data.path="], "data.path is \"\"")]
    #[case::rate(&["optimizer.lr=-3"], "optimizer.lr is -3")]
    fn mistakes_are_refused_before_the_start(#[case] sets: &[&str], #[case] words: &str) {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let error = load(None, &sets).unwrap().value.check().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(isobar_command::exit::of(&error), Exit::Usage);
    }

    /// Earlier versions had a table `[diffusion]` in place of `[task]`.
    #[test]
    fn runs_of_earlier_versions_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, "[diffusion]\nmembers = 2\n[diffusion.sampler]\nnum_steps = 3\n").unwrap();
        let sources = Sources::default().file(&file).set("diffusion.p_mean=-2.0");
        let resolved = config::load::<Config>(&sources).unwrap();
        assert_eq!((resolved.value.task.name(), resolved.value.task.members()), ("diffusion", 2));
        let text = resolved.to_toml_with_origins().unwrap();
        assert!(text.contains("[task]") && !text.contains("[diffusion"), "{text}");
        assert!(text.contains("num_steps = 3") && text.contains("p_mean = -2.0"), "{text}");
    }
}
