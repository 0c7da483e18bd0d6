//! `cargo xtask test`: everything that CI runs.
//!
//! It starts suites and programs, and contains no test.

mod processors;
mod reader;
mod report;
mod stream;
mod stress;
mod suites;
mod summary;

use std::{
    env,
    path::Path,
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use isobar_harness::{SKIPS, THREADS};
use tempfile::NamedTempFile;

use self::{reader::Reader, report::Times, stream::Running, suites::Suites, summary::Summary};
use crate::{
    run::{ROOT, cargo, line},
    setup::{self, Machine},
};

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    setup: setup::Options,
    /// The tests alone: no format, lints, documentation, or build without default features
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// Tests on more ranks and meshes, with many more random cases, and on emulated processors, too
    #[arg(long)]
    full: bool,
    /// The numeric tests alone, on emulated processors: fewer vector instructions, other numbers of threads
    #[arg(long, conflicts_with_all = ["quick", "full"])]
    processors: bool,
    /// All tests, so many times, while every core is kept busy
    #[arg(
        long, value_name = "N", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with_all = ["quick", "full", "processors"],
    )]
    stress: Option<u32>,
    /// End everything after so many minutes; each round of --stress
    #[arg(long, default_value_t = 90)]
    minutes: u64,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let machine = setup::run(&options.setup)?;
    setup::components()?;
    let limit = Duration::from_secs(60 * options.minutes);
    let mut session = Session::new(&machine, limit);
    if !options.quick && !options.processors && options.stress.is_none() {
        session.checks()?;
    }
    if let Some(suites) = session.build()? {
        match options.stress {
            Some(rounds) => stress::run(&mut session, &suites, rounds, limit)?,
            None if options.processors => processors::run(&mut session, &suites)?,
            None => {
                session.test_all(options.full, &suites)?;
                if options.full {
                    processors::run(&mut session, &suites)?;
                }
            }
        }
        report::processor(suites.isobar.as_deref()).iter().for_each(|text| println!("{text}"));
    }
    if env::var("CI").is_ok_and(|ci| ci == "true") {
        session.summary.forbid_skips();
    }
    print!("{}", session.times);
    let summary = session.summary;
    summary.skips.iter().for_each(|skip| println!("skipped {skip}"));
    summary.failures.iter().for_each(|failure| println!("failed {failure}"));
    if !summary.first.lines.is_empty() {
        println!("the first failed test printed:");
        summary.first.lines.iter().for_each(|line| println!("       {line}"));
    }
    println!("{}", summary.line());
    Ok(if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tests for cargo to run.
struct Tests {
    /// Words before each name in the report; empty for the usual run.
    label: String,
    /// Arguments of `cargo test` that choose their programs.
    chosen: Vec<String>,
    /// Arguments of these programs that choose tests.
    filters: Vec<String>,
    /// Environment variables they run with.
    variables: Vec<(&'static str, String)>,
    /// Number of tests that run at once, for each core.
    at_once: usize,
}

/// The package whose tests start programs.
const RUNS: &str = "isobar-tests";

/// Modules of that package whose tests mostly wait: for deadlines, for lost ranks, for SLURM.
const WAITING: [&str; 14] = [
    "collectives_gloo",
    "collectives_mpi",
    "exits",
    "faults",
    "floods",
    "hosts",
    "launch",
    "launchers",
    "machine",
    "mismatches",
    "once",
    "progress",
    "random_faults",
    "slurm",
];

/// Trainings and damaged files of that package that take minutes each: they run with `--full` only. The trainings repeat as programs
/// those that the crates `models` and `train` test over threads.
const LONG: [&str; 5] = [
    "curves::single_precision",
    "domain::convolutions_and_attention_train_alike",
    "domain::in_single_precision",
    "domain::split_fields_train_as_whole_ones",
    "hostile::damaged_files_are_values_or_errors",
];

impl Tests {
    /// The whole workspace; `full`, with more ranks, meshes and random cases. The crates' tests compute; of those that start
    /// programs, some wait, and leave the cores to the others.
    fn all(full: bool) -> [Self; 3] {
        let mut variables = vec![(THREADS, "1".to_owned())];
        if full {
            variables
                .extend([("XTASK_FULL", "1"), ("PROPTEST_CASES", "2000")].map(|(k, v)| (k, v.to_owned())));
        }
        let modules = WAITING.map(|module| format!("{module}::"));
        let waiting = modules.iter().cloned();
        let long = if full { &[][..] } else { &LONG[..] };
        let skipped = modules.iter().cloned().chain(long.iter().map(|&name| name.to_owned()));
        let others = skipped.flat_map(|name| ["--skip".to_owned(), name]);
        let tests = |chosen: &[&str], filters: Vec<String>, at_once: usize| Self {
            label: String::new(),
            chosen: chosen.iter().map(|word| (*word).to_owned()).collect(),
            filters,
            variables: variables.clone(),
            at_once,
        };
        [
            tests(&["--workspace", "--exclude", RUNS], Vec::new(), 1),
            tests(&["--package", RUNS, "--test", "main"], waiting.collect(), 2),
            tests(&["--package", RUNS], others.collect(), 1),
        ]
    }
}

/// One run of this task.
struct Session<'a> {
    machine: &'a Machine,
    end: Instant,
    summary: Summary,
    times: Times,
}

impl<'a> Session<'a> {
    fn new(machine: &'a Machine, limit: Duration) -> Self {
        Self { machine, end: Instant::now() + limit, summary: Summary::default(), times: Times::start() }
    }

    /// Format, lints, documentation, and a build without MPI.
    fn checks(&mut self) -> Result<()> {
        let mut linted = false;
        for (name, mut command) in checks(self.machine) {
            let begun = Instant::now();
            if name == DOCUMENTATION && linted {
                share_with_lints(&mut command);
            }
            let passed = stream::finish(&mut command, self.end)?;
            self.times.add(name, begun.elapsed());
            linted |= name == LINTS && passed;
            self.summary.check(name, &line(&command), passed);
        }
        Ok(())
    }

    /// Builds all tests; none if that fails.
    fn build(&mut self) -> Result<Option<Suites>> {
        let words = ["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"];
        let command = self.machine.cargo(&words);
        let repeat = line(&self.machine.cargo(&words[..3]));
        let mut suites = Suites::default();
        let begun = Instant::now();
        let passed = stream::read_output(command, self.end, |text| suites.read_message(text))?;
        self.times.add("build of the tests", begun.elapsed());
        if !passed {
            self.summary.check("build of the tests", &repeat, false);
        }
        Ok(passed.then_some(suites))
    }

    /// Runs the tests of the whole workspace. Tests that start programs often wait for them, and run beside those that compute.
    fn test_all(&mut self, full: bool, suites: &Suites) -> Result<()> {
        self.test(&Tests::all(full), suites)
    }

    /// Runs tests side by side, and takes what they print into the summary, one after the other.
    fn test(&mut self, tests: &[Tests], suites: &Suites) -> Result<()> {
        let running = tests.iter().map(|tests| self.start(tests)).collect::<Result<Vec<_>>>()?;
        // All are read to their end, whatever happens to one, so that none runs on alone.
        let all: Vec<_> =
            running.into_iter().zip(tests).map(|(it, tests)| self.read(it, tests, suites)).collect();
        all.into_iter().collect()
    }

    fn start(&self, tests: &Tests) -> Result<RunningTests> {
        let skips = tempfile::NamedTempFile::new().context("failed to make a file for skips")?;
        let mut command = self.machine.cargo(&["test"]);
        command.args(&tests.chosen).arg("--no-fail-fast").arg("--").args(&tests.filters);
        command.env(SKIPS, skips.path()).envs(tests.variables.iter().map(|(key, value)| (key, value)));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        command.env("RUST_TEST_THREADS", (tests.at_once * cores).to_string());
        let words = line(&command);
        Ok(RunningTests { words, skips, command: Running::start(command, self.end)? })
    }

    fn read(&mut self, running: RunningTests, tests: &Tests, suites: &Suites) -> Result<()> {
        let variables = tests.variables.iter().map(|(key, value)| format!("{key}={value} "));
        let prefix = variables.collect::<String>() + &line(&self.machine.cargo(&["test"]));
        let mut reader = Reader::new(suites, &prefix, &tests.label);
        let failed_before = self.summary.failed;
        let summary = &mut self.summary;
        let mut last = Instant::now();
        let passed = running.command.show_and_read(|text, came| {
            last = came;
            reader.read_line(text, came, summary);
        })?;
        reader.finish(last, summary).into_iter().for_each(|(name, took)| self.times.add(&name, took));
        self.summary.read_skips(running.skips.path());
        if !passed && self.summary.failed == failed_before {
            // A build script or a deadline ended it before any test could fail.
            self.summary.check(&format!("{}{}", tests.label, running.words), &running.words, false);
        }
        Ok(())
    }
}

/// A `cargo test` that was started.
struct RunningTests {
    words: String,
    /// File in which its tests note that they were skipped.
    skips: NamedTempFile,
    command: Running,
}

const LINTS: &str = "lints";
const DOCUMENTATION: &str = "documentation";
const DENY_WARNINGS: [&str; 2] = ["-D", "warnings"];

/// Lets `command` use what the lints have compiled of the workspace: cargo keeps it apart by compiler, clippy's arguments included.
/// If clippy's driver is elsewhere, it is compiled again.
fn share_with_lints(command: &mut Command) {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).current_dir(&*ROOT).output();
    let Ok(sysroot) = sysroot else { return };
    let driver = Path::new(String::from_utf8_lossy(&sysroot.stdout).trim()).join("bin/clippy-driver");
    if driver.exists() {
        let words = DENY_WARNINGS.map(|word| format!("{word}__CLIPPY_HACKERY__"));
        command.env("RUSTC_WORKSPACE_WRAPPER", driver).env("CLIPPY_ARGS", words.concat());
    }
}

fn checks(machine: &Machine) -> Vec<(&'static str, Command)> {
    let mut clippy = machine.cargo(&["clippy", "--workspace", "--all-targets"]);
    clippy.arg("--").args(DENY_WARNINGS);
    // Joined to the flags of .cargo/config.toml, which RUSTDOCFLAGS would replace. Programs are named like libraries,
    // whose pages they would take.
    let deny = "build.rustdocflags=['-D', 'warnings']";
    let doc = ["doc", "--workspace", "--no-deps", "--lib", "--config", deny];
    let mut checks = vec![
        ("format", cargo(&["fmt", "--all", "--check"])),
        (LINTS, clippy),
        (DOCUMENTATION, machine.cargo(&doc)),
    ];
    if machine.mpi {
        let check = machine.cargo_without_default_features(&["check", "--workspace"]);
        checks.push(("build without default features", check));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module that is renamed would wait among those that compute.
    #[test]
    fn modules_that_wait_exist() {
        let folder = ROOT.join("tests/tests");
        for module in WAITING {
            assert!(folder.join(module).with_extension("rs").exists(), "{module}");
        }
    }

    /// Cargo takes up what clippy compiled only where the words are those that `cargo clippy` gives its driver.
    #[test]
    fn documentation_shares_with_lints() {
        let mut command = Command::new("cargo");
        share_with_lints(&mut command);
        let words = command.get_envs().find(|(key, _)| *key == "CLIPPY_ARGS").and_then(|(_, words)| words);
        assert!(
            words.is_none_or(|words| words == "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"),
            "{words:?}"
        );
    }
}
