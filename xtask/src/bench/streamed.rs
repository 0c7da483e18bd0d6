//! `cargo xtask bench --streamed`: a training step with streamed samples, beside the same step with samples in memory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::median;
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
    /// Largest resident memory of the process.
    peak_mib: f64,
}

/// Makes the data sets, times both steps, and prints a table.
///
/// # Errors
///
/// A command fails, or, with `check`, a limit is exceeded.
pub(super) fn run(rounds: usize, check: bool) -> Result<()> {
    let (all, few) = (made("trajectories", TRAJECTORIES)?, made("few", FEW)?);
    let streamed = ["data.cache=none".to_owned(), format!("data.host_memory={BUDGET_MIB}MiB")];
    let step = steps(&few, &["train.max_steps=5".to_owned()])?;
    let (mut memory, mut stream, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        let [own, read] = [steps(&all, &[])?, steps(&all, &streamed)?];
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
    ensure!(!check || ratio <= MOST && peak <= most, "the streamed step exceeds its limit of time or memory");
    Ok(())
}

/// The program, in the folder of the workspace.
fn isobar() -> Command {
    let mut command = Command::new(ROOT.join("target/release/isobar"));
    command.current_dir(&*ROOT).env("OMP_NUM_THREADS", "1");
    command
}

/// Returns the path of a file of trajectories, which is made if it is missing.
fn made(name: &str, trajectories: usize) -> Result<PathBuf> {
    let file = ROOT.join(format!("target/bench/{name}.h5"));
    if !file.is_file() {
        let sets =
            [format!("samples={trajectories}"), "dims=2".into(), "points=256".into(), "frames=51".into()];
        let mut make = isobar();
        make.args(["data", "make", "advection_diffusion", "--out"]).arg(&file);
        run_command(make.args(sets.iter().flat_map(|set| ["--set", set])))?;
    }
    Ok(file)
}

/// Trains some steps on a file.
fn steps(file: &Path, sets: &[String]) -> Result<Steps> {
    let output = ROOT.join("target/bench/runs");
    let own = [format!("data.path={}", file.display()), format!("run.output={}", output.display())];
    let mut train = isobar();
    train.args(["train", "benches/streamed.toml", "--overwrite"]);
    train.args(own.iter().chain(sets).flat_map(|set| ["--set", set]));
    fs::create_dir_all(&output).with_context(|| format!("make {}", output.display()))?;
    let said = output.join("said");
    train.stdout(Stdio::null()).stderr(File::create(&said)?);
    let mut child =
        train.spawn().context("start `isobar train`; see whether target/release/isobar is there")?;
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let mut peak_mib = 0.0;
    let ended = loop {
        if let Some(ended) = child.try_wait()? {
            break ended;
        }
        peak_mib = fs::read_to_string(&status).ok().and_then(|text| peak(&text)).unwrap_or(peak_mib);
        thread::sleep(Duration::from_millis(20));
    };
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
