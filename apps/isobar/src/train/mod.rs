//! `isobar train`: a configuration becomes ranks, data, a model and a run.

mod fields;
mod picture;
mod raster;

use std::path::Path;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use isobar_collectives::Group;
use isobar_manager::config::{MeshConfig, Resolved};
use isobar_manager::{DistributedManager, logging};
use isobar_shard::{Generator, ParallelRegion, ParamStore};
use isobar_train::{
    DataParallelConfig, FieldTask, FitConfig, ModelConfig, Parameters, Ranks, Step, Summary, fit,
};
use tch::{Kind, Tensor};

use self::fields::Fields;
use crate::config::{Config, ConfigArgs};
use crate::exit::Exit;
use crate::{start, terminal};

/// What each rank may set for itself: where it finds the others, what it says, and paths of its own machine.
const RANKS_OWN: [&str; 8] = [
    "distributed.method",
    "distributed.addr",
    "distributed.port",
    "distributed.interface",
    "distributed.timeout_s",
    "distributed.log",
    "run.output",
    "data.path",
];

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

    let data = Fields::read_alike(config, manager.device(), &ranks.world)?;
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
        data_parallel: data_parallel(manager, config),
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

/// The settings of the section, and those that the manager has.
fn data_parallel(manager: &DistributedManager, config: &Config) -> DataParallelConfig {
    DataParallelConfig {
        broadcast_buffers: manager.broadcast_buffers(),
        find_unused_parameters: manager.find_unused_parameters(),
        ..config.data_parallel.clone()
    }
}

/// Makes the mesh. The groups that share samples and those that share a model are its axes `data` and `model`, or the
/// manager's own where the number of ranks that share a model was given to it.
fn groups(manager: &DistributedManager, config: &Config) -> Result<(Ranks, Group)> {
    let world = manager.group(None)?;
    let mesh = &config.distributed.mesh;
    let own = manager.group(Some("model_parallel")).ok();
    let (data, model) = if let (Some(model), true) = (&own, *mesh == MeshConfig::default()) {
        (manager.group(Some("data_parallel"))?, model.clone())
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
    if let Some(own) = own.filter(|own| own.size().max(model.size()) > 1 && own.ranks() != model.ranks()) {
        bail!(Exit::Usage.because(format!(
            "distributed.model_parallel_size (or MODEL_PARALLEL_SIZE) lets ranks {:?} share a model, and distributed.mesh \
             ranks {:?}; set one of them, or both alike",
            own.ranks(),
            model.ranks()
        )));
    }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use isobar_collectives::threads;
    use isobar_models::DistributedAfnoConfig;
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

    #[rstest]
    #[case::mesh_not_set(&[-1], &["data"], true)]
    #[case::alike(&[-1, 2], &["data", "model"], true)]
    #[case::other_size(&[1, 4], &["data", "model"], false)]
    #[case::no_model_axis(&[4], &["data"], false)]
    #[case::other_ranks(&[2, 2], &["model", "data"], false)]
    fn mesh_and_model_parallel_size_agree(
        #[case] shape: &[i64],
        #[case] names: &[&str],
        #[case] agree: bool,
    ) {
        let errors = on_ranks(4, |manager| {
            manager.create_process_subgroup("model_parallel", 2, None, false).unwrap();
            manager.create_orthogonal_process_group("data_parallel", "model_parallel", false).unwrap();
            let model = ModelConfig::DistributedAfno(DistributedAfnoConfig::new([64, 64], 1));
            let mut config = Config { model, ..Config::default() };
            config.distributed.mesh.shape = shape.to_vec();
            config.distributed.mesh.names = names.iter().map(|&name| name.to_owned()).collect();
            groups(&manager, &config).map(|(ranks, model)| (ranks.data.size(), model.size()))
        });
        for found in errors {
            match found {
                Ok(sizes) => assert!(agree && sizes == (2, 2), "{sizes:?}"),
                Err(error) => assert!(!agree && error.to_string().contains("set one of them"), "{error}"),
            }
        }
    }
}
