//! `isobar train`: a configuration becomes ranks, data, a model and a run.

mod fields;
mod picture;
mod raster;

use std::path::Path;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use isobar_collectives::Group;
use isobar_manager::config::Resolved;
use isobar_manager::{DistributedManager, logging};
use isobar_shard::{Generator, ParallelRegion, ParamStore};
use isobar_train::{FieldTask, FitConfig, ModelConfig, Parameters, Ranks, Step, Summary, fit};
use tch::{Kind, Tensor};

use self::fields::Fields;
use crate::config::{Config, ConfigArgs};
use crate::exit::Exit;
use crate::{start, terminal};

/// What each rank may set for itself: where it finds the others, and folders of its own machine.
const RANKS_OWN: [&str; 3] = ["distributed", "run.output", "data.path"];

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
pub(crate) fn run(args: &TrainArgs) -> Result<Exit> {
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
    let (ranks, model_group) = groups(manager, config)?;
    let folder = config.run.folder();
    let text = resolved.to_toml_with_origins()?;
    if manager.rank() == 0 {
        keep(&folder, &text)?;
    }

    let data = Fields::read(config, manager.device())?;
    let store = ParamStore::new(Generator::new(config.run.seed)).with_options(Kind::Float, manager.device());
    let mut store = store.with_region(ParallelRegion::new(model_group.clone()));
    let network = config.model.build(&mut store)?;
    let (params, buffers) = Parameters::from_store(&store, &model_group)?;
    tracing::info!(
        parameters = params.elements(),
        train = data.train.len(),
        validation = data.validation.len(),
        "training starts"
    );
    let task = FieldTask {
        forward: |x: &Tensor, step: Option<Step<'_>>| network.forward(x, step),
        train: data.train,
        validation: data.validation,
        input: data.input,
        target: data.target,
        augment: config.data.augment.into(),
        loss: config.train.loss,
        seed: config.run.seed,
    };
    let fit_config = FitConfig {
        folder: folder.clone(),
        seed: config.run.seed,
        train: config.train.clone(),
        optimizer: config.optimizer.clone(),
        schedule: config.schedule.clone(),
        data_parallel: config.data_parallel.clone(),
        checkpoint: config.checkpoint.clone(),
        metrics: config.metrics.clone(),
        resolved: text,
        extra: serde_json::json!({
            "input": {"mean": task.input.mean(), "std": task.input.std()},
            "target": {"mean": task.target.mean(), "std": task.target.std()},
        }),
    };
    let summary = fit(&task, &params, &buffers, &ranks, &fit_config)?;
    let picture = picture::draw(&task, &ranks.world, &folder)?;
    if manager.rank() == 0 {
        let baseline = (!task.validation.is_empty()).then(|| task.mean_field_error()).transpose();
        report(&summary, baseline.map_err(anyhow::Error::from_boxed)?, picture.as_deref());
    }
    Ok(())
}

/// Makes the mesh. The groups that share samples and those that share a model are its axes `data` and `model`.
fn groups(manager: &DistributedManager, config: &Config) -> Result<(Ranks, Group)> {
    let world = manager.group(None)?;
    let mesh = &config.distributed.mesh;
    let (data, model) = if let Ok(model) = manager.group(Some("model_parallel")) {
        (manager.group(Some("data_parallel"))?, model)
    } else {
        let names: Vec<&str> = mesh.names.iter().map(String::as_str).collect();
        if let Some(other) = names.iter().find(|name| !["data", "model"].contains(name)) {
            bail!(Exit::Usage.because(format!(
                "distributed.mesh has an axis \"{other}\"; training knows the axes \"data\" and \"model\""
            )));
        }
        let made = manager.initialize_mesh(&mesh.shape, &names)?;
        let axis = |name: &str| -> Result<Group> {
            match names.contains(&name) {
                true => Ok(made.group(name)?),
                false => Ok(Group::single()),
            }
        };
        (axis("data")?, axis("model")?)
    };
    if model.size() > 1 && !matches!(config.model, ModelConfig::DistributedAfno(_)) {
        bail!(Exit::Usage.because(format!(
            "{} ranks are to share a model, but the model of this configuration is whole on every rank; choose \
             model.type = \"distributed_afno\", or a mesh with the axis \"data\" only",
            model.size()
        )));
    }
    Ok((Ranks { world, data }, model))
}

/// Leaves the resolved configuration beside the run.
fn keep(folder: &Path, text: &str) -> Result<()> {
    let file = folder.join("config.toml");
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&file, text));
    written.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", file.display())).into())
}

fn report(summary: &Summary, baseline: Option<f64>, picture: Option<&Path>) {
    let percent = |error: f64| format!("{:.2} %", error * 100.0);
    terminal::line(&format!("{} steps in {:.0} s", summary.steps, summary.seconds));
    if let (Some(error), Some(baseline)) = (summary.validation_error, baseline) {
        terminal::line(&format!(
            "validation relative L2 error {}; predicting the mean field gives {}",
            percent(error),
            percent(baseline)
        ));
    }
    if let Some(picture) = picture {
        terminal::line(&format!("picture     {}", picture.display()));
    }
    if let Some(checkpoint) = &summary.checkpoint {
        terminal::line(&format!("checkpoint  {}", checkpoint.display()));
    }
}
