//! `isobar plan`: memory and communication of a training step, with one thread for each planned rank.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use isobar_collectives::threads;
use isobar_data::{DataConfig, HostMemory};
use isobar_manager::{DistributedManager, format_bytes};
use isobar_torch::meta;
use isobar_train::config::{MetricsConfig, Precision};
use isobar_train::{FieldLayout, FitConfig, Forward, StepPlan, plan_step};
use serde::Serialize;
use tch::Device;

use crate::config::{Config, ConfigArgs};
use crate::run::{self, Fields, Job, Run, Scoring, TaskRun};
use crate::train::data_parallel;
use isobar_command::exit::{self, Exit};
use isobar_command::terminal;

/// Arguments of `isobar plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of ranks of the planned run; by default that of the mesh (`distributed.mesh.shape`), or 1
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Option<u16>,
    /// Memory limit of a rank, such as 80GiB: exit code 1 if a step needs more
    #[arg(long, value_name = "SIZE")]
    memory: Option<HostMemory>,
    /// Run the steps on the CPU of this machine, with all samples set to one: memory then includes workspaces of kernels. One rank
    /// only
    #[arg(long, conflicts_with = "ranks")]
    compute: bool,
    /// Print the numbers of every rank as JSON
    #[arg(long)]
    json: bool,
}

/// Memory and traffic of a training step on one rank, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
struct RankPlan {
    rank: usize,
    /// Samples of the step, over all ranks.
    batch: usize,
    /// Parameters and buffers of this rank.
    parameters: u64,
    /// Samples that are kept in memory, and static fields.
    samples: u64,
    gradients: u64,
    optimizer: u64,
    forward_peak: u64,
    backward_peak: u64,
    update_peak: u64,
    peak: u64,
    collectives: u64,
    sent: u64,
    received: u64,
}

/// Runs the command.
pub(crate) fn command(args: &PlanArgs) -> Result<Exit> {
    let resolved = args.config.load(&[])?;
    let config = &resolved.value;
    config.check()?;
    let device = match args.compute {
        true => {
            isobar_torch::memory::install_caching_allocator();
            Device::Cpu
        }
        false => meta::DEVICE,
    };
    let ranks = match args.ranks {
        Some(ranks) => usize::from(ranks),
        None if args.compute => 1,
        None => of_mesh(&config.distributed.mesh.shape),
    };
    let plans = plan(config, ranks, device)?;
    match args.json {
        true => terminal::line(&serde_json::to_string_pretty(&plans)?),
        false => table(config, &plans).iter().for_each(|line| terminal::line(line)),
    }
    let Some(limit) = args.memory else { return Ok(Exit::Good) };
    let peak = plans.iter().map(|plan| plan.peak).max().unwrap_or_default();
    if peak <= limit.bytes() {
        return Ok(Exit::Good);
    }
    bail!(
        "a training step needs {} on a rank, more than the {limit} of --memory; use more ranks (--ranks), lower train.batch_size, raise \
         train.accumulate, or recompute activations (keys of [model])",
        format_bytes(peak)
    );
}

/// Longest wait of a rank for the others, which share the cores of this machine.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// Returns the number of ranks of a mesh of this shape; 1 if it depends on the launch.
fn of_mesh(shape: &[i64]) -> usize {
    shape
        .iter()
        .try_fold(1_usize, |ranks, &extent| ranks.checked_mul(usize::try_from(extent).ok()?))
        .unwrap_or(1)
}

/// Plans the step of each rank, which is a thread of this process.
fn plan(config: &Config, ranks: usize, device: Device) -> Result<Vec<RankPlan>> {
    meta::enable()?;
    let plans = threads::run(ranks, TIMEOUT, |world| {
        let _rank = DistributedManager::bind_thread(&world);
        let planned = plan_own(config, device);
        if let Err(error) = &planned {
            world.leave(&exit::text(error));
        }
        planned
    });
    all_or_first_error(plans)
}

/// Plans the step of this thread's rank. All ranks call.
fn plan_own(config: &Config, device: Device) -> Result<RankPlan> {
    let manager = DistributedManager::get()?;
    manager.set_broadcast_buffers(config.distributed.broadcast_buffers);
    manager.set_find_unused_parameters(config.distributed.find_unused_parameters);
    if let Some(size) = config.distributed.model_parallel_size.filter(|size| *size > 1) {
        manager.create_process_subgroup("model_parallel", i64::from(size), None, false)?;
        manager.create_orthogonal_process_group("data_parallel", "model_parallel", false)?;
    }
    run::on_device(&manager, config, device, Planning { manager: &manager, config })
}

/// Returns the plans of all ranks, or the first error; a rank's own error before one about another rank.
fn all_or_first_error(plans: Vec<Result<RankPlan>>) -> Result<Vec<RankPlan>> {
    let (mut all, mut errors) = (Vec::with_capacity(plans.len()), Vec::new());
    for plan in plans {
        match plan {
            Ok(plan) => all.push(plan),
            Err(error) => errors.push(error),
        }
    }
    errors.into_iter().min_by_key(|error| exit::of(error) == Exit::Lost).map_or(Ok(all), Err)
}

/// Takes a step without values.
struct Planning<'a> {
    manager: &'a DistributedManager,
    config: &'a Config,
}

impl Job for Planning<'_> {
    type Out = RankPlan;
    const TRAINS: bool = true;

    fn goes_on_from(&self) -> Option<std::path::PathBuf> {
        None
    }

    fn run<L, F>(self, run: Run<L, F>) -> Result<RankPlan>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let Self { manager, config } = self;
        // Metrics are of validation; their climatology would be read.
        let metrics = MetricsConfig { report: Vec::new(), ..config.metrics.clone() };
        let unscored = Config { metrics, ..config.clone() };
        let scoring = Scoring::new(&run.source, &unscored, &run.target_window, &run.ranks.world)?;
        // The longest samples of a schedule.
        let data = DataConfig { train_steps: config.data.train_steps.most().into(), ..config.data.clone() };
        let mut fields = Fields::planned(
            &run.source,
            &data,
            [&run.window, &run.target_window],
            (config.train.precision.kind(), run.device),
        )?;
        // A second stage has the scales of the first.
        if let Some(([input, target], [forcing, statics])) =
            run.forward.regression().map(|first| first.normalizers())
        {
            (fields.input, fields.target) = (input.clone(), target.clone());
            (fields.forcing, fields.statics) = (forcing.cloned(), statics.cloned());
        }
        let TaskRun { task, params, buffers, ranks, .. } = run.with_samples(fields, scoring, config)?;
        let fit_config = FitConfig {
            seed: config.run.seed,
            train: config.train.clone(),
            optimizer: config.optimizer.clone(),
            schedule: config.schedule.clone(),
            data_parallel: data_parallel(manager, config),
            ..FitConfig::default()
        };
        let step = plan_step(&task, &params, &buffers, &ranks, &fit_config).map_err(of_values)?;
        Ok(RankPlan::new(ranks.world.rank(), &step))
    }
}

/// Names the operator that needs the values of its inputs.
fn of_values(error: isobar_train::Error) -> anyhow::Error {
    let text = isobar_manager::error_text(&error);
    let operator = text.split_once(WITHOUT_KERNEL).and_then(|(before, _)| before.rsplit(' ').next());
    match operator {
        Some(operator) => anyhow::anyhow!(
            "operator {} cannot run on the meta device: its output depends on the values of its inputs, or libtorch has no kernel for \
             it there; plan the step with --compute, on one rank",
            operator.trim_end_matches(':')
        ),
        None => error.into(),
    }
}

/// libtorch's message for an operator without a kernel for the meta device, after its name.
const WITHOUT_KERNEL: &str = " attempted to run this operator with Meta tensors";

impl RankPlan {
    fn new(rank: usize, step: &StepPlan) -> Self {
        let StepPlan { batch, parameters, samples, gradients, optimizer, forward, backward, update, traffic } =
            *step;
        Self {
            rank,
            batch,
            parameters,
            samples,
            gradients,
            optimizer,
            forward_peak: forward,
            backward_peak: backward,
            update_peak: update,
            peak: step.peak(),
            collectives: traffic.operations,
            sent: traffic.sent,
            received: traffic.received,
        }
    }
}

/// A row of the table: its title, its value for a rank, and its format.
type Row = (&'static str, fn(&RankPlan) -> u64, fn(u64) -> String);

const ROWS: [Row; 11] = [
    ("parameters and buffers", |plan| plan.parameters, format_bytes),
    ("samples and static fields", |plan| plan.samples, format_bytes),
    ("gradients", |plan| plan.gradients, format_bytes),
    ("optimizer state and averages", |plan| plan.optimizer, format_bytes),
    ("peak, forward", |plan| plan.forward_peak, format_bytes),
    ("peak, backward", |plan| plan.backward_peak, format_bytes),
    ("peak, optimizer step", |plan| plan.update_peak, format_bytes),
    ("peak", |plan| plan.peak, format_bytes),
    ("collectives and messages", |plan| plan.collectives, |count| count.to_string()),
    ("sent", |plan| plan.sent, format_bytes),
    ("received", |plan| plan.received, format_bytes),
];

/// The numbers of the ranks: the least, the most, and which rank has the most.
fn table(config: &Config, plans: &[RankPlan]) -> Vec<String> {
    let mut lines = vec![format!(
        "training step of {} samples: model {}, {} ranks",
        plans.first().map_or(0, |plan| plan.batch),
        config.model.name(),
        plans.len()
    )];
    if matches!(config.train.precision, Precision::Bf16Mixed | Precision::Fp16Mixed) {
        lines.push("activations are counted, and sent, in float32: in 16 bits they need as little as half, casts of parameters more".to_owned());
    }
    lines.push(format!("{:<30}{:>14}{:>14}   rank", "per rank", "min", "max"));
    lines.extend(ROWS.iter().map(|(title, number, write)| {
        let least = plans.iter().map(number).min().unwrap_or_default();
        // The first of equals.
        let most = plans.iter().rev().max_by_key(|plan| number(plan));
        let (rank, most) = most.map_or((0, 0), |plan| (plan.rank, number(plan)));
        let rank = if least == most { String::new() } else { rank.to_string() };
        format!("{title:<30}{:>14}{:>14}   {rank}", write(least), write(most)).trim_end().to_owned()
    }));
    lines
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use isobar_data::DataPath;
    use rstest::rstest;

    use super::*;

    fn config(name: &str, sets: &[&str]) -> Config {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let file = root.join("configs").join(name);
        // Paths of data are relative to the root.
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let mut resolved = crate::config::load(Some(&file), &sets).unwrap().value;
        let DataPath::One(path) = &resolved.data.path else { panic!("one path") };
        resolved.data.path = DataPath::One(root.join(path));
        resolved
    }

    const DOMAIN: &str = "distributed.mesh.names=[\"domain\"]";

    /// Without values, ranks exchange as much as with them.
    #[rstest]
    #[case("darcy_afno.toml", &[DOMAIN], 3)]
    #[case("darcy_fno.toml", &["distributed.mesh.names=[\"data\",\"domain\"]", "distributed.mesh.shape=[2,2]"], 4)]
    #[case("darcy_transolver.toml", &[DOMAIN], 2)]
    #[case("navier_stokes_unet.toml", &["distributed.mesh.names=[\"shard\"]"], 2)]
    #[case("shallow_water_pangu.toml", &[DOMAIN], 2)]
    fn traffic_is_that_of_a_step_with_values(
        #[case] name: &str,
        #[case] sets: &[&str],
        #[case] ranks: usize,
    ) {
        let config = config(name, &[&["distributed.mesh.shape=[-1]", "train.batch_size=2"], sets].concat());
        let traffic = |device| {
            let plans = plan(&config, ranks, device).unwrap();
            plans.iter().map(|plan| (plan.collectives, plan.sent, plan.received)).collect::<Vec<_>>()
        };
        let planned = traffic(meta::DEVICE);
        assert!(planned.iter().all(|(_, sent, _)| *sent > 0));
        assert_eq!(planned, traffic(Device::Cpu));
    }

    #[test]
    fn split_fields_take_less_memory() {
        let config = config("darcy_fno.toml", &[DOMAIN, "distributed.mesh.shape=[-1]"]);
        let peak =
            |ranks| plan(&config, ranks, meta::DEVICE).unwrap().iter().map(|plan| plan.peak).max().unwrap();
        let ratio = peak(4) as f64 / peak(1) as f64;
        assert!(ratio < 0.4, "{ratio}");
    }

    /// Each rank holds its shards of parameters, gradients and moments.
    #[test]
    fn shards_are_parts() {
        let shard = ["distributed.mesh.names=[\"shard\"]"];
        let config = config("darcy_fno.toml", &[&shard[..], &["optimizer.type=adamw"]].concat());
        let sizes = |ranks| {
            let plan = plan(&config, ranks, meta::DEVICE).unwrap()[0];
            [plan.parameters, plan.gradients, plan.optimizer]
        };
        let (whole, quarter) = (sizes(1), sizes(4));
        assert_eq!(whole[2], 2 * whole[1]);
        for (whole, quarter) in whole.into_iter().zip(quarter) {
            assert!((0.24..0.27).contains(&(quarter as f64 / whole as f64)), "{quarter} of {whole}");
        }
    }

    /// Settings of the manager count, and the longest samples of a schedule.
    #[test]
    fn settings_reach_the_plan() {
        let numbers = |sets: &[&str], ranks| {
            let config = config("navier_stokes_unet.toml", &[sets, &["train.batch_size=2"]].concat());
            let plan = plan(&config, ranks, meta::DEVICE).unwrap()[0];
            (plan.collectives, plan.peak)
        };
        let broadcast = |on: bool| {
            let on = format!("distributed.broadcast_buffers={on}");
            numbers(&["model.normalization=batchnorm", &on], 2).0
        };
        assert!(broadcast(true) > broadcast(false));
        let steps = |sets: &[&str]| numbers(sets, 1).1;
        let schedule = "data.train_steps=[{epoch=0,steps=1},{epoch=5,steps=3}]";
        assert_eq!(steps(&[schedule]), steps(&["data.train_steps=3"]));
    }

    #[test]
    fn the_mesh_says_how_many_ranks() {
        assert_eq!([&[2, 3][..], &[-1, 2], &[], &[i64::MAX, 4]].map(of_mesh), [6, 1, 1, 1]);
    }

    /// A climatology is the mean of all training samples, which no rank reads.
    #[test]
    fn metrics_read_nothing() {
        let missing = r#"metrics.climatology="no/such/file.nc""#;
        let config = config("shallow_water_pangu.toml", &[r#"metrics.report=["acc"]"#, missing]);
        plan(&config, 1, meta::DEVICE).unwrap();
    }

    /// A rank's own error comes before the loss of another rank.
    #[test]
    fn errors_name_their_cause() {
        let config =
            config("darcy_afno.toml", &["distributed.mesh.names=[\"domain\"]", "distributed.mesh.shape=[3]"]);
        let error = plan(&config, 2, meta::DEVICE).unwrap_err();
        assert_eq!(exit::of(&error), Exit::Usage, "{error:?}");
    }
}
