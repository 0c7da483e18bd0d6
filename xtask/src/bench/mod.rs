//! `cargo xtask bench`: Isobar beside PhysicsNeMo, PyTorch and DTensor on this machine.
//!
//! It starts programs and compares their times; it measures nothing itself.

mod attention;
mod memory;
mod models;
mod streamed;
mod weights;

use std::{collections::BTreeMap, fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use crate::{
    packages,
    run::{ROOT, output, run as run_command},
    setup,
};

const PEERS: [&str; 7] = [
    "torch==2.11.0",
    "nvidia-physicsnemo==2.2.2",
    "zarr==3.1.6",
    "netCDF4==1.7.5.1.post1",
    "h5py==3.16.0",
    "scipy==1.17.1",
    "pandas==3.1.1",
];
/// Sources of models, installed without their dependencies, which these models do not need.
const SOURCES: [&str; 2] = ["the_well==1.2.0", "microsoft-aurora==2.0.1"];

/// Peers that Isobar is compared with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    PhysicsNemo,
    /// Of PhysicsNeMo, this case, which does the same work in another way.
    PhysicsNemoCase(&'static str),
    DTensor,
    /// Python library of the file format.
    Files,
    /// PyTorch on all ranks, with a halo exchange written by hand.
    ByHand,
    /// The model in PyTorch on one process, beside this case of ours on one rank.
    OneProcess(&'static str),
    /// FFTW on MPI, in one process a rank.
    Fftw,
    /// One-rank runs of this case, all at the same time.
    Alone(&'static str),
    /// The model's training step over all ranks, beside one-rank runs of it, all at the same time.
    Scaling(models::Cases),
    /// This case of ours, of which the other may take a part.
    Of(&'static str),
}

impl Peer {
    fn name(self) -> &'static str {
        match self {
            Self::PhysicsNemo | Self::PhysicsNemoCase(_) => "PhysicsNeMo",
            Self::DTensor => "DTensor",
            Self::Files => "Python",
            Self::ByHand => "PyTorch halo",
            Self::OneProcess(_) => "PyTorch",
            Self::Fftw => "FFTW-MPI",
            Self::Alone(_) | Self::Scaling(_) => "alone",
            Self::Of(_) => "Isobar",
        }
    }

    /// Its name for a case of ours.
    fn case(self, name: &'static str) -> &'static str {
        match self {
            Self::PhysicsNemoCase(case) | Self::Alone(case) | Self::Of(case) | Self::OneProcess(case) => case,
            Self::Scaling(cases) => cases.alone,
            Self::Fftw => "fft/rfft2_irfft2",
            Self::PhysicsNemo | Self::DTensor | Self::Files | Self::ByHand => name,
        }
    }

    /// Our case of a row of that name.
    fn ours(self, name: &'static str) -> &'static str {
        match self {
            Self::OneProcess(case) => case,
            Self::Scaling(cases) => cases.shared,
            _ => name,
        }
    }

    /// Its script, run by torchrun on all ranks, if that is how it is run.
    fn script(self) -> Option<&'static str> {
        match self {
            Self::PhysicsNemo | Self::PhysicsNemoCase(_) | Self::ByHand => {
                Some("benches/peers/physicsnemo_bench.py")
            }
            Self::DTensor => Some("benches/peers/dtensor_bench.py"),
            Self::Files => Some("benches/data.py"),
            Self::Fftw | Self::OneProcess(_) | Self::Alone(_) | Self::Scaling(_) | Self::Of(_) => None,
        }
    }
}

/// The script of PyTorch on one process.
const ONE_PROCESS: &str = "benches/models.py";

/// Row of the table.
#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    peer: Peer,
    /// Minimum ratio, if any.
    least: Option<f64>,
}

/// Rows other than those of models, in the order of the table.
const CASES: [(&str, Peer, Option<f64>); 28] = [
    ("all_gather_v/dim0", Peer::PhysicsNemo, Some(4.0)),
    ("all_gather_v/dim1", Peer::PhysicsNemo, Some(3.5)),
    ("all_gather_v/fwd_bwd", Peer::PhysicsNemo, Some(5.0)),
    ("scatter_v", Peer::PhysicsNemo, Some(5.0)),
    ("indexed_all_to_all_v/fwd_bwd", Peer::PhysicsNemo, Some(3.0)),
    ("afno/train_step", Peer::PhysicsNemo, Some(1.4)),
    ("overhead/mul", Peer::DTensor, None),
    ("overhead/linear", Peer::DTensor, None),
    ("overhead/from_local", Peer::DTensor, None),
    ("redistribute/s0_r_4MiB", Peer::DTensor, Some(3.0)),
    ("redistribute/s0_r_64MiB", Peer::DTensor, Some(3.0)),
    ("redistribute/s0_s1_4MiB", Peer::DTensor, Some(3.0)),
    ("redistribute/s0_s1_64MiB", Peer::DTensor, Some(3.0)),
    ("redistribute/r_s0_64MiB", Peer::DTensor, Some(3.0)),
    ("overhead/reshape", Peer::DTensor, None),
    ("shard/conv2d_fwd_bwd", Peer::ByHand, Some(1.0)),
    ("shard/conv2d_exchange", Peer::Alone("shard/conv2d_no_exchange"), Some(1.0 / 1.1)),
    ("fft/rfft2_irfft2", Peer::PhysicsNemo, Some(7.0)),
    ("fft/rfft2_irfft2_transposed", Peer::Fftw, Some(1.0 / 1.15)),
    ("fft/rfft2_irfft2_split_last", Peer::PhysicsNemoCase("fft/rfft2_irfft2"), Some(4.0)),
    ("models/afno", Peer::PhysicsNemoCase("afno/train_step"), Some(1.5)),
    ("attention/ring_4096", Peer::Alone("attention/one_rank_4096"), Some(1.0 / 0.58)),
    ("attention/ring_16384", Peer::Alone("attention/one_rank_16384"), Some(1.0 / 0.58)),
    ("overhead/recording", Peer::Of("overhead/step_a_collective"), Some(100.0)),
    ("checkpoint/async", Peer::Of("checkpoint/sync"), Some(10.0)),
    ("data/zarr_windows", Peer::Files, Some(1.0)),
    ("data/netcdf_windows", Peer::Files, Some(1.0)),
    ("data/hdf5_windows", Peer::Files, Some(1.0)),
];

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    setup: setup::Options,
    /// Number of rounds, in which both are run in turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Number of repeats of a case in a run
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// Only these cases, comma-separated
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Ranks of each
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Fail if a ratio is below its minimum
    #[arg(long)]
    check: bool,
    /// Only the models of benches/models.json: their training step beside PyTorch's, and over the ranks
    #[arg(long, conflicts_with = "cases")]
    models: bool,
    /// Only windows of files, beside zarr-python, netCDF4 and h5py
    #[arg(long, conflicts_with_all = ["cases", "models"])]
    data: bool,
    /// Only the peak memory of a training step of each model, on one rank and on four
    #[arg(long, conflicts_with_all = ["cases", "data", "models", "check"])]
    memory: bool,
    /// Only attention against the number of tokens, on 1, 2 and 4 ranks: tables, and a chart (about an hour on two cores)
    #[arg(long, conflicts_with_all = ["cases", "data", "models", "check", "memory", "streamed"])]
    attention: bool,
    /// Only a training step with streamed samples, beside the same step with samples in memory, on one rank and on `--ranks`
    #[arg(long, conflicts_with_all = ["cases", "data", "memory", "models"])]
    streamed: bool,
    /// Only load weights of Isobar into the classes of the models' sources, and compare the outputs; nothing is timed
    #[arg(long, conflicts_with_all = ["attention", "cases", "check", "data", "memory", "models", "streamed"])]
    weights: bool,
}

/// The rounds of one case: seconds of the peer, seconds of ours, ours over one memcpy of the output.
#[derive(Default)]
struct Rounds {
    peer: Vec<f64>,
    ours: Vec<f64>,
    memcpy: Vec<f64>,
}

impl Rounds {
    /// Takes our measurement of the case.
    fn take(&mut self, ours: &Value, case: &str) -> Result<()> {
        self.ours.push(seconds(ours, case, "Isobar")?);
        self.memcpy.extend(ours["cases"][case]["memcpy_ratio"].as_f64());
        Ok(())
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = setup::run(&options.setup)?;
    ensure!(machine.mpi, "the benchmark runs on mpirun, and MPI is not installed");
    if options.memory {
        build(&machine)?;
        return memory::run(options.repeats);
    }
    if options.attention {
        build(&machine)?;
        return attention::run();
    }
    if options.streamed {
        build(&machine)?;
        return streamed::run(options.ranks, options.rounds, options.check);
    }
    if options.weights {
        return weights::run(&machine, &install_peers()?);
    }
    let of_models = models::rows()?;
    let listed = CASES.iter().map(|&(name, peer, least)| Row { name, peer, least });
    let all: Vec<Row> = if options.models { of_models } else { listed.chain(of_models).collect() };
    let known = |name: &String| {
        all.iter().find(|row| row.name == name).copied().with_context(|| {
            let names: Vec<&str> = all.iter().map(|row| row.name).collect();
            format!("there is no case `{name}`, expected one of {}", names.join(", "))
        })
    };
    let table: Vec<Row> = match options.cases.is_empty() {
        true if options.data => all.iter().filter(|row| row.peer == Peer::Files).copied().collect(),
        true => all.clone(),
        false => options.cases.iter().map(known).collect::<Result<_>>()?,
    };
    let chosen: Vec<(&'static str, Peer)> = table.iter().map(|row| (row.name, row.peer)).collect();
    let peers = install_peers()?;
    build(&machine)?;
    let asked = |names: &[&str]| {
        ["--cases".to_owned(), names.join(","), "--repeats".to_owned(), options.repeats.to_string()]
    };
    let rows = |wanted: &dyn Fn(Peer) -> bool| -> Vec<(&'static str, Peer)> {
        chosen.iter().copied().filter(|&(_, peer)| wanted(peer)).collect()
    };
    let of_fftw = rows(&|peer| peer == Peer::Fftw);
    let of_one = rows(&|peer| matches!(peer, Peer::OneProcess(_)));
    let fftw = if of_fftw.is_empty() { None } else { Some(build_fftw()?) };
    let ranks = options.ranks.to_string();
    let peer_run = |script: &str, names: &[&str]| {
        let mut command = Command::new(peers.join("bin/torchrun"));
        command.args(["--standalone", "--nproc-per-node", &ranks]);
        command.arg(ROOT.join(script)).args(asked(names));
        command
    };
    let our_run = |ranks: &str, names: &[&str]| our_run(ranks, names, options.repeats);
    let mut rounds: BTreeMap<String, Rounds> = BTreeMap::new();
    for round in 1..=options.rounds {
        eprintln!("round {round} of {}", options.rounds);
        let scripts = [Peer::PhysicsNemo, Peer::DTensor, Peer::Files].into_iter().filter_map(Peer::script);
        let mut theirs = Vec::new();
        for script in scripts {
            let rows = rows(&|peer| peer.script() == Some(script));
            let mut cases: Vec<&str> = rows.iter().map(|(name, peer)| peer.case(name)).collect();
            cases.sort_unstable();
            cases.dedup();
            if !rows.is_empty() {
                theirs.push((rows, times(&mut peer_run(script, &cases))?));
            }
        }
        if let Some(program) = &fftw {
            theirs.push((of_fftw.clone(), times(mpirun(&ranks).arg(program))?));
        }
        for (rows, times) in theirs {
            for (name, peer) in rows {
                let entry = rounds.entry(name.to_owned()).or_default();
                entry.peer.push(seconds(&times, peer.case(name), peer.name())?);
            }
        }
        for &(name, peer) in &of_one {
            let case = peer.case(name);
            let mut python = Command::new(peers.join("bin/python"));
            python.env("TORCHDYNAMO_DISABLE", "1").arg(ROOT.join(ONE_PROCESS)).args(asked(&[case]));
            let theirs = times(&mut python)?;
            let entry = rounds.entry(name.to_owned()).or_default();
            entry.peer.push(seconds(&theirs, case, peer.name())?);
            entry.take(&times(&mut our_run("1", &[case]))?, case)?;
        }
        // Cases that are compared with each other in turns, all others in one process, like the peers'.
        let pairs = rows(&|peer| matches!(peer, Peer::Alone(_) | Peer::Scaling(_) | Peer::Of(_)));
        for &(name, peer) in &pairs {
            let alone = peer.case(name);
            let case = peer.ours(name);
            let ours = times(our_run(&ranks, &[case, alone]).arg("--in-turns"))?;
            let entry = rounds.entry(name.to_owned()).or_default();
            entry.peer.push(seconds(&ours, alone, "Isobar")?);
            entry.take(&ours, case)?;
        }
        let apart = |name: &str| pairs.iter().chain(&of_one).any(|&(other, _)| other == name);
        let rest: Vec<&str> = chosen.iter().map(|&(name, _)| name).filter(|name| !apart(name)).collect();
        if !rest.is_empty() {
            let ours = times(&mut our_run(&ranks, &rest))?;
            for name in rest {
                rounds.entry(name.to_owned()).or_default().take(&ours, name)?;
            }
        }
    }
    let low = print_table(&table, &rounds);
    ensure!(!options.check || low.is_empty(), "below the minimum ratio: {}", low.join(", "));
    Ok(())
}

/// Builds the program that is timed.
fn build(machine: &setup::Machine) -> Result<()> {
    run_command(&mut machine.cargo(&["build", "--release", "--package", "isobar-cli"]))
}

pub(crate) fn mpirun(ranks: &str) -> Command {
    let mut command = Command::new("mpirun");
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.args(["--oversubscribe", "--mca", "odls_base_sigkill_timeout", "5", "-n", ranks]);
    command
}

/// A run of our cases of these names.
fn our_run(ranks: &str, names: &[&str], repeats: usize) -> Command {
    let mut command = mpirun(ranks);
    command.arg(ROOT.join("target/release/isobar")).args(["bench", "--json", "--cases", &names.join(",")]);
    command.args(["--repeats", &repeats.to_string()]);
    command
}

/// The environment of the peers, made where it is not there.
fn install_peers() -> Result<PathBuf> {
    let folder = ROOT.join(".peers");
    let stamp = folder.join("isobar-stamp");
    let wanted = [&PEERS[..], &SOURCES].concat().join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|stamp| stamp == wanted) {
        return Ok(folder);
    }
    run_command(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    for packages in [&PEERS[..], &[&["--no-deps"][..], &SOURCES].concat()] {
        let mut pip = Command::new(folder.join("bin/python"));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]);
        run_command(pip.args(packages))?;
    }
    fs::write(&stamp, wanted)?;
    Ok(folder)
}

/// The program that times FFTW, which is built where it is not there.
fn build_fftw() -> Result<PathBuf> {
    let program = ROOT.join(".peers/fftw_mpi_bench");
    if !program.is_file() {
        packages::install_for_comparison(&["libfftw3-dev", "libfftw3-mpi-dev"])?;
        let mut compile = Command::new("mpicc");
        compile.args(["-O3", "benches/peers/fftw_mpi_bench.c", "-o"]).arg(&program);
        compile.args(["-lfftw3f_mpi", "-lfftw3f", "-lm"]).current_dir(&*ROOT);
        run_command(&mut compile)?;
    }
    Ok(program)
}

fn times(command: &mut Command) -> Result<Value> {
    command.current_dir(&*ROOT).env("OMP_NUM_THREADS", "1");
    let text = output(command)?;
    serde_json::from_str(&text)
        .with_context(|| format!("a benchmark printed something else than JSON:\n{text}"))
}

fn seconds(times: &Value, case: &str, system: &str) -> Result<f64> {
    let entry = &times["cases"][case];
    match entry["median_s"].as_f64() {
        Some(seconds) => Ok(seconds),
        None if entry.is_null() => bail!("{system} has no case {case}"),
        None => bail!("{system} failed at {case}: {}", entry["error"].as_str().unwrap_or("no time given")),
    }
}

/// Prints medians over the rounds; returns what is below the least ratio.
fn print_table(table: &[Row], rounds: &BTreeMap<String, Rounds>) -> Vec<String> {
    println!(
        "{:<30} {:<12} {:>10} {:>10} {:>7} {:>7} {:>10}",
        "case", "peer", "peer ms", "Isobar ms", "ratio", "least", "x memcpy"
    );
    let mut low = Vec::new();
    for &Row { name, peer, least } in table {
        let Some(case) = rounds.get(name) else { continue };
        let ratio = median(case.peer.iter().zip(&case.ours).map(|(peer, ours)| peer / ours).collect());
        if least.is_some_and(|least| ratio < least) {
            low.push(format!("{name} {ratio:.2}"));
        }
        let or_dash = |number: Option<f64>| number.map_or("-".to_owned(), |number| format!("{number:.2}"));
        let memcpy = (!case.memcpy.is_empty()).then(|| median(case.memcpy.clone()));
        println!(
            "{name:<30} {:<12} {:>10} {:>10} {ratio:>7.2} {:>7} {:>10}",
            peer.name(),
            milliseconds(median(case.peer.clone())),
            milliseconds(median(case.ours.clone())),
            or_dash(least),
            or_dash(memcpy)
        );
    }
    low
}

/// Times below a tenth of a millisecond with the digits that tell them apart.
fn milliseconds(seconds: f64) -> String {
    if seconds < 1e-4 { format!("{:.5}", 1e3 * seconds) } else { format!("{:.2}", 1e3 * seconds) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every script that is run is there.
    #[test]
    fn scripts_are_there() {
        let scripts = CASES.iter().filter_map(|(_, peer, _)| peer.script()).chain([ONE_PROCESS]);
        for script in scripts {
            assert!(ROOT.join(script).is_file(), "{script}");
        }
    }

    #[test]
    fn short_times_keep_their_digits() {
        assert_eq!(milliseconds(0.05e-6), "0.00005");
        assert_eq!(milliseconds(0.012345), "12.35");
    }

    #[test]
    fn median_of_even_and_odd() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
