//! `cargo xtask bench --streamed`: a training step with streamed samples, beside the same step with samples in memory, on one rank
//! and on several that share the fields. Both run at the same time, so that a machine whose speed changes does not tell them apart.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{median, mpirun};
use crate::run::{ROOT, run as run_command};

/// Largest ratio of the step times that the project accepts.
const MOST: f64 = 1.05;
const BUDGET_MIB: f64 = 512.0;
/// Trajectories of the streamed data set, of 51 frames of 256 x 256 points: 4.3 GB.
const TRAJECTORIES: usize = 320;
/// Trajectories of the data set in memory, which is small beside the memory of the step: 25 whole batches.
const FEW: usize = 4;
/// Steps at the start, which are not timed.
const WARM_UPS: usize = 5;

/// Makes the data sets, times both steps on one rank and on `ranks`, and prints a table for each.
///
/// # Errors
///
/// A command fails, or, with `check`, a limit is exceeded.
pub(super) fn run(ranks: usize, rounds: usize, check: bool) -> Result<()> {
    let (all, few) = (made("trajectories", TRAJECTORIES)?, made("few", FEW)?);
    let counts = if ranks == 1 { vec![1] } else { vec![1, ranks] };
    let is_within = |ranks| is_within(ranks, rounds, &all, &few);
    let within = counts.into_iter().map(is_within).collect::<Result<Vec<_>>>()?;
    ensure!(!check || within.iter().all(|is| *is), "the streamed step exceeds its limit of time or memory");
    Ok(())
}

/// Prints the table for some ranks, and returns whether the streamed step is within its limits.
fn is_within(ranks: usize, rounds: usize, all: &Path, few: &Path) -> Result<bool> {
    let streamed = ["data.cache=none".to_owned(), format!("data.host_memory={BUDGET_MIB}MiB")];
    let (mut seconds, mut peaks, mut ratios) = ([Vec::new(), Vec::new()], [0.0_f64; 2], Vec::new());
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds} on {ranks} ranks");
        let mut runs =
            [Run::start(ranks, "memory", few, &[])?, Run::start(ranks, "streamed", all, &streamed)?];
        while runs.iter_mut().map(Run::look).collect::<Result<Vec<bool>>>()?.contains(&true) {
            thread::sleep(Duration::from_millis(20));
        }
        let [memory, stream] = step_times(runs.each_ref().map(|run| &run.steps[..]))?;
        ratios.push(stream / memory);
        for (at, step) in [memory, stream].into_iter().enumerate() {
            seconds[at].push(step);
            peaks[at] = peaks[at].max(runs[at].peak_mib);
        }
    }
    println!("{:<24} {:>10} {:>10}", format!("ranks: {ranks}"), "step ms", "peak MiB");
    for ((name, seconds), peak) in ["200 samples in memory", "streamed"].into_iter().zip(seconds).zip(peaks) {
        println!("{name:<24} {:>10.1} {peak:>10.0}", 1e3 * median(seconds));
    }
    let (ratio, most) = (median(ratios), BUDGET_MIB + peaks[0]);
    println!("ratio of the steps {ratio:.3} (at most {MOST})");
    println!("peak {:.0} MiB (at most {most:.0}: the budget and the step in memory)", peaks[1]);
    Ok(ratio <= MOST && peaks[1] <= most)
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

/// A training run that is watched.
struct Run {
    child: Child,
    /// Its output.
    said: PathBuf,
    /// Its metrics: of each step a line with its loss.
    metrics: PathBuf,
    /// Time at which each step was seen.
    steps: Vec<Instant>,
    /// Largest resident memory of a rank.
    peak_mib: f64,
}

impl Run {
    fn start(ranks: usize, name: &str, file: &Path, sets: &[String]) -> Result<Self> {
        let output = ROOT.join("target/bench/runs");
        fs::create_dir_all(&output).with_context(|| format!("make {}", output.display()))?;
        let (said, metrics) = (output.join(format!("{name}.log")), output.join(name).join("metrics.jsonl"));
        if metrics.exists() {
            fs::remove_file(&metrics).with_context(|| format!("remove {}", metrics.display()))?;
        }
        let own = [
            r#"distributed.mesh.names=["domain"]"#.to_owned(),
            format!("data.path={}", file.display()),
            format!("run.output={}", output.display()),
            format!("run.name={name}"),
        ];
        let mut train = mpirun(&ranks.to_string());
        train.current_dir(&*ROOT).env("OMP_NUM_THREADS", "1").arg(program());
        train.args(["train", "benches/streamed.toml", "--overwrite"]);
        train.args(own.iter().chain(sets).flat_map(|set| ["--set", set]));
        train.stdout(Stdio::null()).stderr(File::create(&said)?);
        let child = train.spawn().context("start mpirun")?;
        Ok(Self { child, said, metrics, steps: Vec::new(), peak_mib: 0.0 })
    }

    /// Notes the steps and the memory since the last look; returns whether the run goes on.
    fn look(&mut self) -> Result<bool> {
        let seen = fs::read_to_string(&self.metrics).map_or(0, |text| text.matches("\"loss\":").count());
        self.steps.resize(seen.max(self.steps.len()), Instant::now());
        self.peak_mib = peaks(self.child.id()).fold(self.peak_mib, f64::max);
        let Some(ended) = self.child.try_wait()? else { return Ok(true) };
        ensure!(ended.success(), "`isobar train` failed ({ended})\n{}", fs::read_to_string(&self.said)?);
        ensure!(self.peak_mib > 0.0, "mpirun started no rank as its child");
        Ok(false)
    }
}

/// Returns the mean time of a step of each run while both ran.
fn step_times(runs: [&[Instant]; 2]) -> Result<[f64; 2]> {
    let bounds = runs.map(|steps| steps.get(WARM_UPS).copied().zip(steps.last().copied()));
    let (Some(first), Some(second)) = (bounds[0], bounds[1]) else {
        anyhow::bail!("a run has fewer than {WARM_UPS} steps");
    };
    let (start, end) = (first.0.max(second.0), first.1.min(second.1));
    let mean = |steps: &[Instant]| {
        let within: Vec<&Instant> = steps.iter().filter(|at| (start..=end).contains(at)).collect();
        let (first, last) = within.first().copied().zip(within.last().copied())?;
        (within.len() > 9).then(|| (*last - *first).as_secs_f64() / (within.len() - 1) as f64)
    };
    let few = "the runs had too few steps at the same time";
    Ok([mean(runs[0]).context(few)?, mean(runs[1]).context(few)?])
}

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

    /// Steps before both runs are warm and after one has ended do not count.
    #[test]
    fn steps_are_timed_while_both_run() {
        let start = Instant::now();
        let at = |tenths: u64| start + Duration::from_millis(100 * tenths);
        let fast: Vec<Instant> = (0..30).map(at).collect();
        let slow: Vec<Instant> = (0..18).map(|step| at(2 * step)).collect();
        let [fast, slow] = step_times([&fast, &slow]).unwrap_or_default();
        assert!((fast - 0.1).abs() < 1e-9 && (slow - 0.2).abs() < 1e-9, "{fast} {slow}");
        assert!(step_times([&[start; 3], &[start; 3]]).is_err());
    }

    #[test]
    fn the_peak_is_in_the_status() {
        assert_eq!(peak("Name:\tisobar\nVmHWM:\t    2048 kB\nVmRSS:\t1 kB\n"), Some(2.0));
        assert_eq!(peak("Name:\tisobar\n"), None);
    }
}
