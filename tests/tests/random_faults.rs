//! Faults drawn at random: under each launcher a rank is killed, stopped or panics, on any mesh, most often in the first
//! second of a run or after its last checkpoint. Each job ends soon, blames the right rank, and leaves checkpoints that
//! are complete.
//!
//! One seed makes one run. `FAULT_SEED=7` repeats the run of seed 7, `FAULT_COUNT=100` takes that many seeds from there on,
//! and `FAULT_JOBS=4` runs four at a time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant, SystemTime};
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use isobar_harness::{Exit, Launch, Outcome, workspace};
use isobar_tests::{full, has_mpi};
use isobar_train::checkpoint::{list, verify};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::tempdir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_faulty");
const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// Steps of a run.
const STEPS: usize = 24;

/// Deadline of waits, and silence after which a rank is lost, in seconds: long enough for a loaded machine.
const TIMEOUT: &str = "30.0";
const SILENCE: &str = "6.0";

/// Time after which a job counts as hanging: MPI's start alone may take 20 s.
const LONGEST: Duration = Duration::from_secs(300);

/// Time that a launcher has to end a stopped rank once all others have ended.
const PATIENCE: Duration = Duration::from_secs(20);

/// Seeds of the short form: each launcher, each signal and each third of a run is among them.
const SHORT: u64 = 6;
const FULL: u64 = 500;

/// Ranks along axes, and whether the network is one whose channels are split.
struct Mesh {
    names: &'static [&'static str],
    shape: &'static [usize],
    channels: bool,
}

const fn mesh(names: &'static [&'static str], shape: &'static [usize]) -> Mesh {
    Mesh { names, shape, channels: false }
}

static MESHES: [Mesh; 10] = [
    mesh(&["data"], &[2]),
    mesh(&["data"], &[3]),
    mesh(&["domain"], &[2]),
    mesh(&["shard"], &[2]),
    Mesh { names: &["model"], shape: &[2], channels: true },
    mesh(&["data", "domain"], &[2, 2]),
    mesh(&["data", "shard"], &[2, 2]),
    Mesh { names: &["data", "model"], shape: &[2, 2], channels: true },
    mesh(&["domain", "domain_y"], &[2, 2]),
    mesh(&["shard", "domain"], &[2, 2]),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launcher {
    Mpirun,
    Isobar,
    Plain,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Stop,
    Panic,
}

/// Time of the fault.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// This long after the process was started.
    Start(Duration),
    /// After so many steps are recorded, and then this long.
    Middle(usize, Duration),
    /// This long after the last checkpoint is complete.
    End(Duration),
}

/// A run with a fault.
struct Case {
    seed: u64,
    launcher: Launcher,
    fault: Fault,
    mesh: &'static Mesh,
    ranks: usize,
    victim: usize,
    moment: Moment,
    mode: &'static str,
    /// For a panic: a phase of a step.
    phase: &'static str,
}

/// End of a run with a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ended {
    /// The rank had ended before its fault, or lived through it: all ended well.
    TooLate,
    /// All others had done their work: nobody but the launcher noticed.
    Alone,
    /// The others ended, and named the rank.
    Named,
}

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn micros(&mut self, most: usize) -> Duration {
        Duration::from_micros(self.below(most) as u64)
    }
}

impl Case {
    fn of(seed: u64, mpi: bool) -> Self {
        let mut draw = Draw(seed);
        let _ = draw.next();
        // Neighbouring seeds differ in the launcher, and after three of them in the third of the run.
        let launchers = [Launcher::Mpirun, Launcher::Isobar, Launcher::Plain];
        let launcher = match launchers[(seed % 3) as usize] {
            Launcher::Mpirun if !mpi => Launcher::Plain,
            launcher => launcher,
        };
        let moment = match (seed / 3) % 3 {
            0 => Moment::Start(draw.micros(1_000_000)),
            1 => Moment::End(draw.micros(300_000)),
            _ => Moment::Middle(1 + draw.below(STEPS - 2), draw.micros(50_000)),
        };
        let fault = draw.of(&[Fault::Kill, Fault::Kill, Fault::Stop, Fault::Stop, Fault::Panic]);
        let mesh = &MESHES[draw.below(MESHES.len())];
        let ranks = mesh.shape.iter().product();
        let victim = draw.below(ranks);
        let phase = match moment {
            Moment::Start(_) => "start",
            Moment::Middle(..) => draw.of(&["forward", "backward", "optimizer", "checkpoint"]),
            Moment::End(_) => "end",
        };
        let mode = draw.of(&["sync", "async"]);
        Self { seed, launcher, fault, mesh, ranks, victim, moment, mode, phase }
    }

    fn survivors(&self) -> impl Iterator<Item = usize> {
        let victim = self.victim;
        (0..self.ranks).filter(move |rank| *rank != victim)
    }

    /// Arguments of the run.
    fn words(&self, folder: &Path) -> Vec<String> {
        let config = if self.mesh.channels { "darcy_distributed_afno" } else { "darcy_afno" };
        let patch = if self.mesh.channels { "8" } else { "[8, 8]" };
        let sets = [
            format!("run.output={}", folder.display()),
            "run.name=run".to_owned(),
            "data.path=tests/data/darcy_excerpt.h5".to_owned(),
            "data.validation_samples=0".to_owned(),
            "model.embed_dim=16".to_owned(),
            "model.depth=1".to_owned(),
            "model.num_blocks=4".to_owned(),
            format!("model.patch_size={patch}"),
            "train.batch_size=4".to_owned(),
            "train.epochs=1000".to_owned(),
            format!("train.max_steps={STEPS}"),
            "metrics.every_steps=1".to_owned(),
            "checkpoint.every_steps=4".to_owned(),
            "checkpoint.every_epochs=0".to_owned(),
            format!("checkpoint.mode={}", self.mode),
            format!("distributed.timeout_s={TIMEOUT}"),
            format!("distributed.heartbeat_timeout_s={SILENCE}"),
            format!("distributed.mesh.shape={:?}", self.mesh.shape),
            format!("distributed.mesh.names={:?}", self.mesh.names),
        ];
        let mut words = vec!["train".to_owned(), format!("configs/{config}.toml")];
        words.extend(sets.into_iter().flat_map(|set| ["--set".to_owned(), set]));
        words
    }

    /// The job. Each rank leaves the number of its process in `pid.RANK` and, where it is no child of `isobar launch`, its exit
    /// code in `code.RANK`.
    fn launch(&self, folder: &Path) -> Launch {
        let pid = r#"echo $pid >"$folder/new.$rank"; mv "$folder/new.$rank" "$folder/pid.$rank""#;
        let start = format!(r#"folder={}; rank=${{RANK:-$OMPI_COMM_WORLD_RANK}}"#, folder.display());
        let waiting = format!(
            r#"{start}; trap : TERM; "$@" & pid=$!; {pid}
            while :; do wait $pid; code=$?; kill -0 $pid 2>/dev/null || break; done
            echo $code >"$folder/new.$rank"; mv "$folder/new.$rank" "$folder/code.$rank"; exit $code"#
        );
        let launch = match self.launcher {
            Launcher::Mpirun => Launch::mpirun(self.ranks, "sh").args(["-c", &waiting]),
            Launcher::Plain => Launch::plain(self.ranks, "sh").args(["-c", &waiting]),
            // It watches the process that it has started, which must be the rank itself.
            Launcher::Isobar => Launch::plain(1, ISOBAR)
                .args(["launch", "--grace", "3", "-n", &self.ranks.to_string(), "--log-dir"])
                .arg(folder.join("said"))
                .args(["--", "sh", "-c", &format!(r#"{start}; pid=$$; {pid}; exec "$@""#)]),
        };
        let launch = launch.args(["sh", PROGRAM]).args(self.words(folder)).current_dir(workspace());
        let launch = launch.deadline(LONGEST);
        if self.fault != Fault::Panic {
            return launch;
        }
        let step = if let Moment::Middle(step, _) = self.moment { step } else { 0 };
        let mark = folder.join("mark");
        launch.env("FAULT", format!("{} {} {step} panic {}", self.victim, self.phase, mark.display()))
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seed, launcher, fault, mesh, victim, moment, mode, phase, .. } = self;
        let (names, shape) = (mesh.names, mesh.shape);
        let panics = if *fault == Fault::Panic { format!(" in {phase}") } else { String::new() };
        write!(
            f,
            "seed {seed}: {fault:?}{panics} rank {victim}, {launcher:?}, {names:?} {shape:?}, {moment:?}, {mode}"
        )
    }
}

/// A job and its folder.
struct Job<'a> {
    case: &'a Case,
    folder: &'a Path,
}

impl Job<'_> {
    fn number(&self, name: &str, rank: usize) -> Option<i32> {
        fs::read_to_string(self.folder.join(format!("{name}.{rank}"))).ok()?.trim().parse().ok()
    }

    fn run(&self) -> PathBuf {
        self.folder.join("run")
    }

    fn last_checkpoint(&self) -> PathBuf {
        self.run().join(format!("checkpoints/step_{STEPS:08}/manifest.json"))
    }

    fn steps(&self) -> usize {
        let text = fs::read_to_string(self.run().join("metrics.jsonl")).unwrap_or_default();
        text.lines().filter(|line| line.contains("\"loss\"")).count()
    }

    /// Runs the job and makes its fault; returns how it ended, and whether the fault met the rank.
    fn play(&self) -> Result<(Outcome, bool)> {
        let launch = self.case.launch(self.folder);
        thread::scope(|scope| {
            let running = scope.spawn(move || launch.run());
            let met = self.make_fault(&running);
            let outcome =
                running.join().map_err(|_| anyhow::anyhow!("the thread of the launch panicked"))??;
            Ok((outcome, met || self.folder.join("mark").exists()))
        })
    }

    fn make_fault(&self, running: &ScopedJoinHandle<'_, Result<Outcome>>) -> bool {
        let signal = match self.case.fault {
            Fault::Kill => Signal::SIGKILL,
            Fault::Stop => Signal::SIGSTOP,
            Fault::Panic => return false,
        };
        let (due, wait): (Box<dyn Fn() -> bool>, Duration) = match self.case.moment {
            Moment::Start(wait) => (Box::new(|| self.number("pid", self.case.victim).is_some()), wait),
            Moment::Middle(steps, wait) => (Box::new(move || self.steps() >= steps), wait),
            Moment::End(wait) => (Box::new(|| self.last_checkpoint().exists()), wait),
        };
        while !due() {
            if running.is_finished() {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(wait);
        let Some(victim) = self.number("pid", self.case.victim).map(Pid::from_raw) else { return false };
        if self.number("code", self.case.victim).is_some() || kill(victim, signal).is_err() {
            return false;
        }
        if signal == Signal::SIGSTOP && self.case.launcher != Launcher::Isobar {
            self.end_stopped(victim, running);
        }
        true
    }

    /// Ends a stopped rank that no launcher ends: one of plain processes, and one that the launcher does not know to be the last.
    fn end_stopped(&self, victim: Pid, running: &ScopedJoinHandle<'_, Result<Outcome>>) {
        let mut ended = None;
        while !running.is_finished() {
            thread::sleep(Duration::from_millis(20));
            let codes: Option<Vec<i32>> =
                self.case.survivors().map(|rank| self.number("code", rank)).collect();
            let Some(codes) = codes else { continue };
            let ended = ended.get_or_insert_with(Instant::now);
            let forever = self.case.launcher == Launcher::Plain || codes.iter().all(|code| *code == 0);
            if (forever && ended.elapsed() > Duration::from_secs(1)) || ended.elapsed() > PATIENCE {
                // Once: later its number may be another process's.
                let _ = kill(victim, Signal::SIGKILL);
                return;
            }
        }
    }

    /// Exit codes of the ranks, where they are known; None for a rank that its launcher ended.
    fn codes(&self, outcome: &Outcome) -> Vec<Option<i32>> {
        let known = (0..self.case.ranks).map(|rank| match self.case.launcher {
            Launcher::Isobar => code_in_report(&outcome.ranks[0].stderr, rank, outcome.exit),
            _ => self.number("code", rank),
        });
        // mpirun ends ranks before they can handle the signal.
        let ended = |code: &i32| self.case.launcher == Launcher::Mpirun && [137, 143].contains(code);
        known.map(|code| code.filter(|code| !ended(code))).collect()
    }

    /// Standard error of each rank, and that of the launcher.
    fn said(&self, outcome: &Outcome) -> (Vec<String>, String) {
        if self.case.launcher != Launcher::Isobar {
            let ranks = (0..self.case.ranks).map(|rank| outcome.ranks.get(rank));
            let ranks = ranks.map(|rank| rank.map_or_else(String::new, |rank| rank.stderr.clone()));
            return (ranks.collect(), outcome.launcher.clone());
        }
        let file = |rank| self.folder.join(format!("said/rank_{rank}.err"));
        let ranks = (0..self.case.ranks).map(|rank| fs::read_to_string(file(rank)).unwrap_or_default());
        (ranks.collect(), outcome.ranks[0].stderr.clone())
    }

    /// Judges the end of the job.
    fn judge(&self, outcome: &Outcome, met: bool) -> Result<Ended> {
        let case = self.case;
        ensure!(outcome.exit != Exit::Deadline, "the job does not end");
        self.nothing_lives()?;
        self.checkpoints_are_complete()?;
        let codes = self.codes(outcome);
        let (said, launcher) = self.said(outcome);
        let good = case.survivors().all(|rank| codes[rank] == Some(0));
        if good && outcome.exit == Exit::Code(0) {
            ensure!(self.last_checkpoint().exists(), "the job ended well without its last checkpoint");
            return Ok(Ended::TooLate);
        }
        ensure!(met, "no fault was made, but the job failed");
        let late = matches!(case.moment, Moment::End(_)) || self.last_checkpoint().exists();
        if good {
            ensure!(late, "the others ended well before the end of the run");
            let unnoticed = case.fault == Fault::Stop && case.victim != 0;
            ensure!(!unnoticed, "nobody noticed the stopped rank");
            return Ok(Ended::Alone);
        }
        for rank in case.survivors() {
            let fits = match codes[rank] {
                None | Some(4) => true,
                Some(0) => late,
                Some(_) => false,
            };
            ensure!(fits, "rank {rank} ended with {:?}, expected 4 (of all: {codes:?})", codes[rank]);
        }
        ensure!(
            case.survivors().any(|rank| codes[rank] != Some(0)),
            "the launcher failed, and no rank that was left"
        );
        let all = said.join("\n");
        let (named, others) = (named(&all, case.victim), case.survivors().find(|rank| blamed(&all, *rank)));
        ensure!(others.is_none(), "rank {others:?} is blamed");
        // MPI's start tells no rank of the others; mpirun itself names one that was killed, as "rank 1" or "[[32492,1],1]".
        let by_launcher = [format!("rank {} ", case.victim), format!(",1],{}]", case.victim)];
        let by_launcher = by_launcher.iter().any(|name| launcher.contains(name));
        // Between the rendezvous and the start of the watchdog libtorch's errors name an address only.
        let unwatched = matches!(case.moment, Moment::Start(_))
            && case.launcher == Launcher::Plain
            && all.contains("gloo failed: ")
            && !all.contains("isobar: the job ends");
        let in_start =
            unwatched || all.contains("waits in the start of MPI") || all.contains("has not returned for");
        ensure!(named || by_launcher || in_start, "rank {} is not named", case.victim);
        let reports = all.matches("isobar: the job ends").count();
        ensure!(reports <= 1 || in_start, "{reports} reports");
        if case.launcher == Launcher::Isobar {
            let headline = format!("isobar launch: rank {} (", case.victim);
            ensure!(launcher.contains(&headline), "the launcher's report does not begin with the rank");
        }
        Ok(Ended::Named)
    }

    fn nothing_lives(&self) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(10);
        for rank in 0..self.case.ranks {
            let Some(pid) = self.number("pid", rank) else { continue };
            let ours = || {
                let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                words.contains(&*self.folder.to_string_lossy())
            };
            while ours() {
                if Instant::now() > end {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                    bail!("rank {rank} is left behind");
                }
                thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Each checkpoint with a manifest is complete; several steps before the end there is one.
    fn checkpoints_are_complete(&self) -> Result<()> {
        let found = list(&self.run()).unwrap_or_default();
        for one in found.iter().filter(|one| one.found.is_ok()) {
            verify(&one.path).with_context(|| format!("{} is damaged", one.path.display()))?;
        }
        let whole = found.iter().filter(|one| one.found.is_ok()).count();
        let steps = self.steps();
        ensure!(steps < 12 || whole > 0, "no checkpoint after {steps} steps");
        Ok(())
    }

    /// Resumes the run on the same mesh.
    fn resume(&self) -> Result<()> {
        let launch = Launch::plain(self.case.ranks, ISOBAR).args(self.case.words(self.folder));
        let launch = launch.args(["--resume", "--set", "distributed.timeout_s=120.0"]);
        let launch = launch.args(["--set", "distributed.heartbeat_timeout_s=60.0"]);
        let outcome = launch.current_dir(workspace()).deadline(LONGEST).run()?;
        ensure!(outcome.success(), "the run does not resume\n{outcome}");
        ensure!(self.last_checkpoint().exists(), "the resumed run has no last checkpoint\n{outcome}");
        self.checkpoints_are_complete()
    }
}

/// The exit code of a rank in the report of `isobar launch`; None where the launcher ended the rank.
fn code_in_report(report: &str, rank: usize, exit: Exit) -> Option<i32> {
    let who = format!("rank {rank} (");
    let mut lines = report.lines().skip_while(|line| !line.contains(&who));
    let Some(line) = lines.next() else { return (exit == Exit::Code(0)).then_some(0) };
    // The first line says how the others saw the rank, the next how it ended.
    let line = if line.contains("failed first: it ") { lines.next().unwrap_or_default() } else { line };
    if line.contains("told so by the launcher") {
        return None;
    }
    let number = |before: &str| {
        let rest = line.split_once(before)?.1;
        rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse::<i32>().ok()
    };
    let signal = || number("was killed by signal ").map(|signal| 128 + signal);
    number("ended with code ").or_else(signal).or_else(|| line.contains("ended well").then_some(0))
}

/// Ways to say that a rank failed.
const BLAME: [&str; 8] = [
    "was lost",
    "has not connected",
    "has not been heard of",
    "panicked at",
    "has not come to",
    "ended with",
    "cannot go on",
    "does not answer",
];

/// The text blames this rank, in a report or an error.
fn blamed(text: &str, rank: usize) -> bool {
    let who = format!("rank {rank} (");
    let blames = |line: &str| BLAME.iter().any(|words| line.contains(words));
    // A rank in the start of MPI says of itself that another was lost.
    text.lines()
        .any(|line| line.contains(&who) && blames(line) && !line.contains("waits in the start of MPI"))
}

/// The text names this rank as one that failed, or that others wait for.
fn named(text: &str, rank: usize) -> bool {
    let listed = |line: &str| {
        let lists = line.split('[').skip(1).filter_map(|part| part.split(']').next());
        lists.flat_map(|list| list.split(", ")).any(|entry| entry.trim() == rank.to_string())
    };
    let waits = |line: &str| line.contains("for ranks [") && listed(line);
    let first = |line: &str| rank == 0 && (line.contains("rank 0") || line.contains("could not start"));
    blamed(text, rank) || text.lines().any(|line| waits(line) || first(line))
}

/// Runs a case; the error is what is wrong with it.
fn check(case: &Case) -> Result<Ended> {
    let folder = tempdir()?;
    let job = Job { case, folder: folder.path() };
    let (outcome, met) = job.play()?;
    let judged = job.judge(&outcome, met).and_then(|ended| {
        if case.seed.is_multiple_of(4) {
            job.resume()?;
        }
        Ok(ended)
    });
    judged.map_err(|error| {
        let (said, _) = job.said(&outcome);
        let told =
            if case.launcher == Launcher::Isobar { said.join("\n--- next rank\n") } else { String::new() };
        let codes = job.codes(&outcome);
        anyhow::anyhow!("{error:#}\ncodes {codes:?}, {:.1} s\n{outcome}\n{told}", outcome.wall.as_secs_f64())
    })
}

fn setting(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

#[test]
fn random_faults_end_the_job() {
    let mpi = has_mpi();
    let clock = || SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
    let given = setting("FAULT_SEED");
    let first = given.unwrap_or_else(|| if full() { clock() } else { 0 });
    let usual = if given.is_some() {
        1
    } else if full() {
        FULL
    } else {
        SHORT
    };
    let count = setting("FAULT_COUNT").unwrap_or(usual);
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let jobs = setting("FAULT_JOBS").unwrap_or((cores / 2).clamp(1, 4));
    let (next, results) = (AtomicU64::new(first), Mutex::new(Vec::new()));
    eprintln!("faults of the seeds {first} to {}", first + count - 1);
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let (case, start) = (Case::of(seed, mpi), Instant::now());
                    let result = check(&case);
                    let short = match &result {
                        Ok(ended) => format!("{ended:?}"),
                        Err(error) => format!("WRONG {error:#}"),
                    };
                    eprintln!("{case}: {short}, {:.1} s", start.elapsed().as_secs_f64());
                    results.lock().unwrap().push(result);
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    let mut counts = BTreeMap::new();
    results.iter().flatten().for_each(|ended| *counts.entry(ended).or_insert(0) += 1);
    eprintln!("{count} faults: {counts:?}");
    let problems: Vec<String> =
        results.iter().filter_map(|result| result.as_ref().err()).map(|error| format!("{error:#}")).collect();
    let repeat = "FAULT_SEED=<seed> cargo test -p isobar-tests --test main -- random_faults";
    assert!(
        problems.is_empty(),
        "{} of {count}; repeat one by {repeat}\n{}",
        problems.len(),
        problems.join("\n\n")
    );
}

#[test]
fn seeds_cover_all_launchers_faults_and_times() {
    let cases: Vec<Case> = (0..FULL).map(|seed| Case::of(seed, true)).collect();
    let share =
        |has: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| has(case)).count() * 100 / cases.len();
    for launcher in [Launcher::Mpirun, Launcher::Isobar, Launcher::Plain] {
        assert!(share(&|case| case.launcher == launcher) >= 33);
    }
    assert!(share(&|case| matches!(case.moment, Moment::Start(_))) >= 33);
    assert!(share(&|case| matches!(case.moment, Moment::End(_))) >= 33);
    for fault in [Fault::Kill, Fault::Stop, Fault::Panic] {
        assert!(share(&|case| case.fault == fault) >= 15);
    }
    for mesh in &MESHES {
        assert!(share(&|case| std::ptr::eq(case.mesh, mesh)) >= 5);
    }
    let short = || (0..SHORT).map(|seed| Case::of(seed, true));
    assert!(short().any(|case| case.fault == Fault::Kill) && short().any(|case| case.fault == Fault::Stop));
}
