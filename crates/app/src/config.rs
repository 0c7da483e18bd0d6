//! The configuration of a run, and `isobar config`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use isobar_manager::config::{
    self, DistributedConfig, Resolved, Sources, reference_markdown, reference_toml,
};
use isobar_models::{Batch, FieldSpec, ModelConfig};
use isobar_train::config::{
    CheckpointConfig, DataConfig, DataParallelConfig, MetricsConfig, OptimizerKind, Predict, RunConfig,
    ScheduleKind, TrainConfig,
};
use isobar_train::{Denoising, DiffusionConfig, FitConfig};
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
    /// The samples.
    pub data: DataConfig,
    /// The network.
    pub model: ModelConfig,
    /// Training and sampling of a denoiser; only with a model that is one, such as `edm_preconditioner`.
    pub diffusion: Option<DiffusionConfig>,
    /// The loop.
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
        self.train.weights.check_steps(self.data.train_steps.most())?;
        self.denoising().map(drop)
    }

    /// Returns the training and sampling of the model if it is a denoiser.
    pub(crate) fn denoising(&self) -> Result<Option<Denoising>> {
        let name = self.model.name();
        match (&self.diffusion, self.model.denoises()) {
            (None, None) => Ok(None),
            (Some(diffusion), Some(sigma_data)) => {
                if self.data.train_steps.most() != 1 {
                    bail!(Exit::Usage.because(format!(
                        "data.train_steps is {}, but a denoiser is trained on single steps; --set data.train_steps=1",
                        self.data.train_steps.most()
                    )));
                }
                if self.data.masks().is_some() {
                    bail!(Exit::Usage.because(
                        "data.missing is \"mask\", and the loss of a denoiser takes no mask; --set data.missing=fill"
                    ));
                }
                if diffusion.members > 1
                    && (self.data.predict == Predict::Change || self.data.validation_steps > 1)
                {
                    bail!(Exit::Usage.because(format!(
                        "diffusion.members is {}, but data.predict is \"change\" or data.validation_steps above 1: ensembles are of \
                         one step that predicts frames; --set diffusion.members=1",
                        diffusion.members
                    )));
                }
                if diffusion.condition_on_mean && diffusion.regression.is_none() {
                    bail!(Exit::Usage.because(
                        "diffusion.condition_on_mean is on, but there is no diffusion.regression that predicts the mean; name the folder \
                         of a trained run: --set diffusion.regression=runs/…"
                    ));
                }
                let made = Denoising::new(diffusion, sigma_data, self.run.seed);
                Ok(Some(made.map_err(|error| Exit::Usage.because(format!("[diffusion]: {error}")))?))
            }
            (None, Some(_)) => bail!(Exit::Usage.because(format!(
                "model.type = {name:?} is a denoiser, and there is no [diffusion] that says how it is trained; add the table, or \
                 --set diffusion.p_mean=-1.2"
            ))),
            (Some(_), None) => bail!(Exit::Usage.because(format!(
                "[diffusion] trains a denoiser, and model.type = {name:?} is none; take the table away, or put the model into \
                 one: model.type = \"edm_preconditioner\" with the present table as [model.model]"
            ))),
        }
    }

    /// Checks that the fields can be cut into the patches of `[diffusion.patches]`. `has_conditions` is true if scalars are conditions
    /// of samples.
    pub(crate) fn check_patches(&self, extents: &[usize], has_conditions: bool) -> Result<()> {
        let patches = self.diffusion.as_ref().and_then(|diffusion| diffusion.patches.as_ref());
        let Some(patches) = patches else { return Ok(()) };
        patches
            .check_extents(extents)
            .map_err(|error| Exit::Usage.because(format!("[diffusion.patches]: {error}")))?;
        if patches.condition_on_input && has_conditions {
            bail!(Exit::Usage.because(
                "data.scalars_as is \"conditions\", and patches that are given the full input take no conditions of samples; \
                 --set diffusion.patches.condition_on_input=false"
            ));
        }
        Ok(())
    }

    /// Shape of the model's inputs for such data. A denoiser gets the targets with noise, and the inputs as conditions; on patches, it
    /// may also get the full input. Unless it reads the positions of patches, it is built for the extents of a patch.
    pub(crate) fn fields_of_model(&self, fields: FieldSpec) -> FieldSpec {
        let Some(diffusion) = &self.diffusion else { return fields };
        let inputs = fields.in_channels + fields.position_channels;
        let patches = diffusion.patches.as_ref();
        let whole_channels =
            if patches.is_some_and(|patches| patches.condition_on_input) { inputs } else { 0 };
        let patch = patches.map(|patches| patches.patch_shape.to_vec());
        let (extents, patch_extents) = match patch {
            Some(patch) if !self.model.reads_patches() => (patch, None),
            patch => (fields.extents.clone(), patch),
        };
        let mean = diffusion.regression.is_some() && diffusion.condition_on_mean;
        let mean_channels = if mean { fields.out_channels } else { 0 };
        let arrays = [Batch::<()>::SIGMA, Batch::<()>::CONDITIONS].map(str::to_owned);
        FieldSpec {
            extents,
            patch_extents,
            condition_channels: mean_channels + inputs + whole_channels,
            in_channels: fields.out_channels,
            position_channels: 0,
            arrays: fields.arrays.iter().cloned().chain(arrays).collect(),
            ..fields
        }
    }
}

/// Configuration arguments of the command line.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// A TOML file, or the folder of a run, which holds its configuration; see `isobar config reference` for the keys
    #[arg(value_name = "CONFIG")]
    file: PathBuf,
    /// Set a key, whatever the file says; may be given several times
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
    Err(Exit::Usage
        .because(format!(
            "{} is a folder without a config.toml: expected a TOML file, or the folder of a run{hint}",
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
        for entry in std::fs::read_dir(configs()).unwrap() {
            let path = entry.unwrap().path();
            let resolved = config::load::<Config>(&Sources::default().file(&path)).unwrap();
            if path.ends_with("reference.toml") {
                assert_eq!(resolved.value, Config::default());
            }
        }
    }
}
