//! The command line.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};
use isobar_bench::BenchArgs;
use isobar_command::exit;
use isobar_launcher::LaunchArgs;
use isobar_manager::config::meant_key;
use isobar_verify::{RankArgs, VerifyArgs};

use crate::check::CheckArgs;
use crate::checkpoint::CheckpointCommand;
use crate::config::{Config, ConfigCommand};
use crate::data::DataCommand;
use crate::plan::PlanArgs;
use crate::predict::PredictArgs;
use crate::trace::TraceCommand;
use crate::train::TrainArgs;

/// Domain-parallel training of scientific models
#[derive(Debug, Parser)]
#[command(name = "isobar", version, after_help = exit::TABLE, propagate_version = true)]
pub(crate) struct Cli {
    /// Command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model
    ///
    /// Reads the configuration, joins the ranks that mpirun, srun or a torchrun-like launcher started (or runs alone),
    /// trains, and prints the validation error of each variable next to that of a baseline (persistence or the mean field). Writes the
    /// resolved configuration, metrics, logs, checkpoints and a picture to the run's folder. The loss curve is the same on any number of ranks.
    #[command(after_long_help = TRAIN_EXAMPLES)]
    Train(TrainArgs),
    /// Predict fields with a trained model
    ///
    /// Reads the configuration that the model was trained with, and its checkpoint, on any number of ranks and any mesh. For
    /// trajectories, each prediction is the input of the next step (rollout). Writes HDF5: The Well's schema or PDEBench's Darcy
    /// layout for data of those formats if all values are finite, otherwise one dataset per variable; NetCDF-4 with --out FILE.nc, Zarr with --out FILE.zarr.
    /// Attributes of the file name the checkpoint and the samples. Also writes a picture and, if the data contain the truth, a table of
    /// the errors of each variable after each step (CSV).
    #[command(after_long_help = PREDICT_EXAMPLES)]
    Predict(PredictArgs),
    /// Plan a training run: memory and communication of each rank, on one machine
    ///
    /// Runs two training steps on tensors that have a shape and no memory, one thread for each rank. Prints the peak memory of the
    /// tensors of a rank over both, and the bytes that it sends and receives in the second. The data set is opened, its samples are not
    /// read, and nothing is written. Workspaces of kernels and communication libraries, and host memory of streamed samples
    /// (`data.host_memory`), are not counted.
    #[command(after_long_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Generate, inspect and convert data sets, and compute their statistics
    #[command(subcommand)]
    Data(DataCommand),
    /// Show configurations
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Launch ranks on this machine and on other hosts by ssh, and restart them after a failure
    ///
    /// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, the rendezvous
    /// variables of Isobar and PyTorch, and OMP_NUM_THREADS, its share of the cores. If a rank fails, the others are ended; the report
    /// names the rank that failed first, the reason, and its last lines of output. With --max-restarts, all ranks are restarted unless
    /// the failure would recur, and `isobar train` resumes from its last checkpoint. SIGTERM, SIGINT and SIGUSR1 are forwarded to all
    /// ranks.
    #[command(after_long_help = LAUNCH_EXAMPLES)]
    Launch(LaunchArgs),
    /// Check the environment of a job: launchers, devices, cores, clocks, disks
    ///
    /// Start it with the launcher of the job. Prints one line per rank and the problems found. `isobar train` runs the same checks
    /// before it starts (`distributed.checks`).
    #[command(after_long_help = CHECK_EXAMPLES)]
    Check(CheckArgs),
    /// List, verify and reshard checkpoints, and export their weights
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Check that sharded operators and models give the dense result, gradients included
    ///
    /// Runs golden cases: files of inputs, weights, outputs and gradients that a dense, single-process run gave. Each case
    /// runs on every number of ranks and every layout that it asks for; outputs and gradients are compared as full tensors
    /// and shard by shard, replicated results bitwise, and the bytes that each rank receives with the operator's budget.
    /// This command starts the ranks itself.
    ///
    /// Prints one line per case: name, number of layouts, largest error in units of the tolerance, and verdict.
    #[command(after_long_help = VERIFY_EXAMPLES)]
    Verify(VerifyArgs),
    /// Time collectives and models on the ranks that this command is started with
    ///
    /// The cases, their names, shapes and sizes are those of the scripts in benches/peers, which time other systems, and
    /// so is the JSON. Every case is checked before it is timed; a time is that of the slowest rank, the median over the
    /// repeats. For collectives, the time of one memcpy of the result into allocated memory is printed, too.
    #[command(after_long_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// Analyse the flight records of a job
    #[command(subcommand)]
    Trace(TraceCommand),
    /// One rank of `verify`
    #[command(hide = true)]
    VerifyRank(RankArgs),
}

impl Cli {
    /// Reads a command line, its first word being the program. An option that is a key of the configuration is answered with
    /// how keys are set.
    pub(crate) fn read(words: &[OsString]) -> Result<Self, clap::Error> {
        Self::try_parse_from(words).map_err(|error| with_key(error, words))
    }
}

fn with_key(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    let takes_keys = ["train", "plan", "predict", "check", "config"];
    if error.kind() != ErrorKind::UnknownArgument
        || !words.get(1).is_some_and(|command| takes_keys.iter().any(|name| command == *name))
    {
        return error;
    }
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg).cloned() else {
        return error;
    };
    let option = option.split('=').next().unwrap_or_default();
    let key = option.strip_prefix("--").and_then(meant_key::<Config>);
    let Some(key) = key else { return error };
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let at = words.iter().position(|word| word.split('=').next() == Some(option));
    let value = at.and_then(|at| match words[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => words.get(at + 1).map(|next| &**next).filter(|next| !next.starts_with('-')),
    });
    let tip = format!("to set a key of the configuration, use '--set {key}={}'", value.unwrap_or("VALUE"));
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}

const TRAIN_EXAMPLES: &str = "\
Examples:
  On one rank:
    isobar train configs/darcy_afno.toml
  On two, with other settings than the file's:
    mpirun -n 2 isobar train configs/darcy_afno.toml --set train.epochs=20 --set optimizer.lr=5e-4
  Resume after an interruption:
    srun -n 4 --mpi=pmix isobar train configs/darcy_afno.toml --resume
  Replace the results of an earlier run, once this one has a checkpoint:
    isobar train configs/darcy_afno.toml --overwrite

Exit codes: 0 trained; 1 the loss is not finite, or another error; 2 wrong command line or configuration, or a folder that
another run uses or has results in; 3 data or a checkpoint that cannot be used, files that cannot be written; 4 a rank was lost or timed out; 5 the ranks do not agree; 6 told to stop, and left a
checkpoint if it had taken a step.";

const PLAN_EXAMPLES: &str = "\
Examples:
  On 16 ranks that split the fields:
    isobar plan configs/darcy_afno.toml --ranks 16 --set 'distributed.mesh.names=[\"domain\"]'
  A limit of 80 GiB a rank, on a mesh of 4 x 8:
    isobar plan configs/navier_stokes_fno.toml --ranks 32 --memory 80GiB \\
      --set 'distributed.mesh.names=[\"data\", \"domain\"]' --set 'distributed.mesh.shape=[4, 8]'

Exit codes: 0 planned; 1 a step needs more than --memory, or an operator cannot run on the meta device; 2 wrong command line
or configuration; 3 data that cannot be opened.";

const LAUNCH_EXAMPLES: &str = "\
Examples:
  Four ranks on this machine:
    isobar launch -n 4 -- isobar train configs/darcy_afno.toml
  Two on each of two hosts that share the file system; started again up to three times:
    isobar launch --hosts node7:2,node8:2 --max-restarts 3 -- isobar train configs/darcy_afno.toml
  What the ranks print in files, for a run in the background:
    isobar launch -n 4 --log-dir logs -- isobar train configs/darcy_afno.toml &

Exit codes: that of the rank that failed first, 128 + the number of the signal that killed it, or 4 where its host was lost; 2
for a wrong command line. With 2, 3, 5, 6 (stopped by a signal), 126 and 127 nothing is restarted.";

const CHECK_EXAMPLES: &str = "\
Examples:
  The environment that a run would have, its folder included:
    srun -n 4 --mpi=pmix isobar check configs/darcy_afno.toml
  That of two ranks on this machine:
    isobar launch -n 2 -- isobar check

Exit codes: 0 nothing is wrong, or only what is warned of; 2 something would lose the results, or the ranks cannot start; 4 a
rank was lost or timed out.";

const PREDICT_EXAMPLES: &str = "\
Examples:
  From the first frame of the validation trajectories to the last:
    isobar predict runs/navier_stokes_fno
  Thirty steps from frame 4 of trajectory 21, its fields split over four ranks:
    mpirun -n 4 isobar predict configs/navier_stokes_fno.toml --samples 21 --start 4 --steps 30 \\
      --set distributed.mesh.names='[\"domain\"]' --out runs/trajectory21.h5

Exit codes: 0 predicted; 1 the prediction is not finite (all files are written), or another error; 2 wrong command line or
configuration; 3 data or a checkpoint that cannot be used; 4 a rank was lost or timed out; 5 the ranks do not agree.";

const BENCH_EXAMPLES: &str = "\
Examples:
  On 2 ranks, as a table, and the names of all cases:
    OMP_NUM_THREADS=1 mpirun -n 2 isobar bench
    isobar bench --list
  Two cases, for a program:
    mpirun -n 2 isobar bench --cases all_gather_v/dim0,scatter_v --repeats 15 --json";

const VERIFY_EXAMPLES: &str = "\
Examples:
  All cases of a folder, ranks as threads of this process:
    isobar verify tests/golden_own
  Two operators under mpirun, on 2 ranks and on a mesh of 2 x 2:
    isobar verify --backend mpi --ranks 2,2x2 --ops all_gather_v,afno tests/golden
  Without MPI, and with a report for a program:
    isobar verify --backend gloo --json report.json tests/golden

Exit codes: 0 every case passed on every layout; 1 a case failed, is unsupported, or none was found; 2 wrong command
line; 3 a case that cannot be read; 4 ranks that cannot start.";

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};
    use rstest::rstest;

    /// clap's tip for values that look like options does not help.
    #[rstest]
    #[case(&["predict", "runs/a", "--samples", "-1"], "expected a sample's number such as 7")]
    #[case(&["predict", "runs/a", "--start", "-1"], "invalid value '-1' for '--start <FRAME>'")]
    #[case(&["predict", "runs/a", "--steps", "-1"], "invalid value '-1' for '--steps <STEPS>'")]
    #[case(&["launch", "-n", "-1", "true"], "-1 is not in 1..=65536")]
    fn negative_numbers_are_values(#[case] args: &[&str], #[case] words: &str) {
        let args = std::iter::once("isobar").chain(args.iter().copied());
        let error = super::Cli::try_parse_from(args).unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains("tip:"), "{error}");
    }

    #[test]
    fn the_command_line_is_sound() {
        super::Cli::command().debug_assert();
    }
}
