//! `cargo xtask bench --streamed`: a training step with streamed samples, beside the same step with samples in memory, on one rank
//! and on several that share the fields.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{median, mpirun};
use crate::run::{ROOT, run as run_command};

/// Largest ratio of the step times that the project accepts.
const MOST: f64 = 1.05;
const BUDGET_MIB: f64 = 512.0;
/// Trajectories of the data set, of 51 frames of 256 x 256 points: 4.3 GB.
const TRAJECTORIES: usize = 320;
/// Trajectories of a data set that is small beside the memory of the step.
const FEW: usize = 1;

/// Step time and peak memory of one run.
struct Steps {
    seconds: f64,
    /// Largest resident memory of a rank.
    peak_mib: f64,
}

/// Makes the data sets, times both steps on one rank and on `ranks`, and prints a table for each.
///
/// # Errors
///
/// A command fails, or, with `check`, a limit is exceeded.
pub(super) fn run(ranks: usize, rounds: usize, check: bool) -> Result<()> {
    let (all, few) = (made("trajectories", TRAJECTORIES)?, made("few", FEW)?);
    let counts = if ranks == 1 { vec![1] } else { vec![1, ranks] };
    let fit =
        counts.into_iter().map(|ranks| is_within(ranks, rounds, &all, &few)).collect::<Result<Vec<_>>>()?;
    ensure!(!check || fit.iter().all(|fit| *fit), "the streamed step exceeds its limit of time or memory");
    Ok(())
}

/// Prints the table for some ranks, and returns whether the streamed step is within its limits.
fn is_within(ranks: usize, rounds: usize, all: &Path, few: &Path) -> Result<bool> {
    println!("ranks: {ranks}");
    let steps = |file: &Path, sets: &[String]| steps(ranks, file, sets);
    let streamed = ["data.cache=none".to_owned(), format!("data.host_memory={BUDGET_MIB}MiB")];
    let step = steps(few, &["train.max_steps=5".to_owned()])?;
    let (mut memory, mut stream, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        let [own, read] = [steps(all, &[])?, steps(all, &streamed)?];
        ratios.push(read.seconds / own.seconds);
        memory.push(own);
        stream.push(read);
    }
    println!("{:<12} {:>10} {:>10}", "samples", "step ms", "peak MiB");
    for (name, runs) in [("in memory", &memory), ("streamed", &stream)] {
        let of = |value: fn(&Steps) -> f64| median(runs.iter().map(value).collect());
        println!("{name:<12} {:>10.1} {:>10.0}", 1e3 * of(|run| run.seconds), of(|run| run.peak_mib));
    }
    let ratio = median(ratios);
    let peak = stream.iter().map(|run| run.peak_mib).fold(0.0, f64::max);
    let most = BUDGET_MIB + step.peak_mib;
    println!("ratio of the steps {ratio:.3} (at most {MOST})");
    println!(
        "peak {peak:.0} MiB (at most {most:.0}: the budget and {:.0} MiB of the step alone)",
        step.peak_mib
    );
    Ok(ratio <= MOST && peak <= most)
}

/// The program.
fn program() -> PathBuf {
    ROOT.join("target/release/isobar")
}

/// Returns the path of a file of trajectories, which is made if it is missing.
fn made(name: &str, trajectories: usize) -> Result<PathBuf> {
    let file = ROOT.join(format!("target/bench/{name}.h5"));
    if !file.is_file() {
        let sets =
            [format!("samples={trajectories}"), "dims=2".into(), "points=256".into(), "frames=51".into()];
        let mut make = Command::new(program());
        make.current_dir(&*ROOT).args(["data", "make", "advection_diffusion", "--out"]).arg(&file);
        run_command(make.args(sets.iter().flat_map(|set| ["--set", set])))?;
    }
    Ok(file)
}

/// Trains some steps on a file.
fn steps(ranks: usize, file: &Path, sets: &[String]) -> Result<Steps> {
    let output = ROOT.join("target/bench/runs");
    let own = [format!("data.path={}", file.display()), format!("run.output={}", output.display())];
    let mut train = mpirun(&ranks.to_string());
    train.current_dir(&*ROOT).env("OMP_NUM_THREADS", "1").arg(program());
    train.args([
        "train",
        "benches/streamed.toml",
        "--overwrite",
        "--set",
        r#"distributed.mesh.names=["domain"]"#,
    ]);
    train.args(own.iter().chain(sets).flat_map(|set| ["--set", set]));
    fs::create_dir_all(&output).with_context(|| format!("make {}", output.display()))?;
    let said = output.join("said");
    train.stdout(Stdio::null()).stderr(File::create(&said)?);
    let mut child =
        train.spawn().context("start `isobar train`; see whether target/release/isobar is there")?;
    let mut peak_mib: f64 = 0.0;
    let ended = loop {
        if let Some(ended) = child.try_wait()? {
            break ended;
        }
        peak_mib = peaks(child.id()).fold(peak_mib, f64::max);
        thread::sleep(Duration::from_millis(20));
    };
    ensure!(!ended.success() || peak_mib > 0.0, "mpirun started no rank as its child");
    ensure!(ended.success(), "`isobar train` failed ({ended})\n{}", fs::read_to_string(&said)?);
    // Speeds are averages over ten seconds; those of the first half also include the start.
    let metrics = fs::read_to_string(output.join("streamed/metrics.jsonl"))?;
    let lines = metrics.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let speeds: Vec<f64> = lines.iter().filter_map(|line| line["samples_per_second"].as_f64()).collect();
    let speed = speeds.get(speeds.len() / 2..).filter(|last| !last.is_empty());
    let speed = median(speed.context("the run has recorded no speed")?.to_vec());
    Ok(Steps { seconds: BATCH / speed, peak_mib })
}

/// Samples of a step in benches/streamed.toml.
const BATCH: f64 = 8.0;

/// Returns the peak resident memory of each rank that `mpirun`, the process `launcher`, has started, in MiB.
fn peaks(launcher: u32) -> impl Iterator<Item = f64> {
    let parent = format!("PPid:\t{launcher}\n");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let statuses = processes.filter_map(|process| fs::read_to_string(process.path().join("status")).ok());
    statuses.filter(move |status| status.contains(&parent)).filter_map(|status| peak(&status))
}

/// Returns the peak resident memory in the text of Linux's `/proc/PID/status`, in MiB.
fn peak(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<f64>().ok()? / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_in_the_status() {
        assert_eq!(peak("Name:\tisobar\nVmHWM:\t    2048 kB\nVmRSS:\t1 kB\n"), Some(2.0));
        assert_eq!(peak("Name:\tisobar\n"), None);
    }
}
