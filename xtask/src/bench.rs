//! `cargo xtask bench`: Isobar and PhysicsNeMo side by side on this machine.

use std::{collections::BTreeMap, fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use crate::{
    run::{ROOT, output, run as run_command},
    setup,
};

const PEERS: [&str; 2] = ["torch==2.11.0", "nvidia-physicsnemo==2.2.2"];

/// Cases, in the order of the table, each with the least ratio that the project asks of itself, if any.
const CASES: [(&str, Option<f64>); 6] = [
    ("all_gather_v/dim0", Some(4.0)),
    ("all_gather_v/dim1", Some(3.5)),
    ("all_gather_v/fwd_bwd", Some(5.0)),
    ("scatter_v", Some(5.0)),
    ("indexed_all_to_all_v/fwd_bwd", Some(3.0)),
    ("afno/train_step", Some(1.4)),
];

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    setup: setup::Options,
    /// How often both are run, in turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// How often a case is repeated in a run
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// Only these cases, comma-separated
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Ranks of each
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Fail if a ratio is below the least that the project asks of itself
    #[arg(long)]
    check: bool,
}

/// The rounds of one case: seconds of the peer, seconds of ours, ours over one memcpy of the output.
#[derive(Default)]
struct Rounds {
    peer: Vec<f64>,
    ours: Vec<f64>,
    memcpy: Vec<f64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = setup::run(&options.setup)?;
    ensure!(machine.mpi, "the benchmark runs on mpirun, and MPI is not installed");
    let names: Vec<&str> = if options.cases.is_empty() {
        CASES.iter().map(|&(name, _)| name).collect()
    } else {
        options.cases.iter().map(String::as_str).collect()
    };
    let peers = install_peers()?;
    run_command(&mut machine.cargo(&["build", "--release", "--package", "isobar"]))?;
    let shared = ["--cases".to_owned(), names.join(","), "--repeats".to_owned(), options.repeats.to_string()];
    let ranks = options.ranks.to_string();
    let peer_run = || {
        let mut command = Command::new(peers.join("bin/torchrun"));
        command.args(["--standalone", "--nproc-per-node", &ranks]);
        command.arg(ROOT.join("benches/peers/physicsnemo_bench.py")).args(&shared);
        command
    };
    let our_run = || {
        let mut command = Command::new("mpirun");
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        command.args(["--oversubscribe", "-n", &ranks]).arg(ROOT.join("target/release/isobar"));
        command.args(["bench", "--json"]).args(&shared);
        command
    };
    let mut rounds: BTreeMap<String, Rounds> = BTreeMap::new();
    for round in 1..=options.rounds {
        eprintln!("round {round} of {}", options.rounds);
        let peer = times(&mut peer_run())?;
        let ours = times(&mut our_run())?;
        for &name in &names {
            let entry = rounds.entry(name.to_owned()).or_default();
            entry.peer.push(seconds(&peer, name, "PhysicsNeMo")?);
            entry.ours.push(seconds(&ours, name, "Isobar")?);
            entry.memcpy.extend(ours["cases"][name]["memcpy_ratio"].as_f64());
        }
    }
    let low = print_table(&names, &rounds);
    ensure!(!options.check || low.is_empty(), "below what the project asks of itself: {}", low.join(", "));
    Ok(())
}

/// The environment of the peers, made where it is not there.
fn install_peers() -> Result<PathBuf> {
    let folder = ROOT.join(".peers");
    let stamp = folder.join("isobar-stamp");
    let wanted = PEERS.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|stamp| stamp == wanted) {
        return Ok(folder);
    }
    run_command(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    let mut pip = Command::new(folder.join("bin/python"));
    pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]).args(PEERS);
    run_command(&mut pip)?;
    fs::write(&stamp, wanted)?;
    Ok(folder)
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
fn print_table(names: &[&str], rounds: &BTreeMap<String, Rounds>) -> Vec<String> {
    println!(
        "{:<30} {:>14} {:>11} {:>7} {:>7} {:>10}",
        "case", "PhysicsNeMo ms", "Isobar ms", "ratio", "least", "x memcpy"
    );
    let mut low = Vec::new();
    for &name in names {
        let Some(case) = rounds.get(name) else { continue };
        let ratio = median(case.peer.iter().zip(&case.ours).map(|(peer, ours)| peer / ours).collect());
        let least = CASES.iter().find(|(case, _)| *case == name).and_then(|&(_, least)| least);
        if least.is_some_and(|least| ratio < least) {
            low.push(format!("{name} {ratio:.2}"));
        }
        let or_dash = |number: Option<f64>| number.map_or("-".to_owned(), |number| format!("{number:.1}"));
        let memcpy = (!case.memcpy.is_empty()).then(|| median(case.memcpy.clone()));
        println!(
            "{name:<30} {:>14.1} {:>11.1} {ratio:>7.2} {:>7} {:>10}",
            1e3 * median(case.peer.clone()),
            1e3 * median(case.ours.clone()),
            or_dash(least),
            or_dash(memcpy)
        );
    }
    low
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_even_and_odd() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
