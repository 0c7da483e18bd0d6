//! `cargo xtask test`: everything that CI runs.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use isobar_harness::{SKIPS, wait_within};

use crate::{
    run::{ROOT, cargo, line},
    setup::{self, Machine},
    summary::Summary,
};

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    setup: setup::Options,
    /// The tests alone: no format, lints, documentation, or build without default features
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// Tests on more ranks and meshes, and with many more random cases, too
    #[arg(long)]
    full: bool,
    /// End everything after so many minutes
    #[arg(long, default_value_t = 90)]
    minutes: u64,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let machine = setup::run(&options.setup)?;
    setup::components()?;
    let end = Instant::now() + Duration::from_secs(60 * options.minutes);
    let mut summary = Summary::default();
    if !options.quick {
        for (name, mut command) in checks(&machine) {
            summary.check(name, stream(&mut command, end, |_| ())?);
        }
    }
    test(&machine, options.full, end, &mut summary)?;
    if env::var("CI").is_ok_and(|ci| ci == "true") {
        summary.forbid_skips();
    }
    summary.skips.iter().for_each(|skip| println!("skipped {skip}"));
    summary.failures.iter().for_each(|failure| println!("failed {failure}"));
    println!("{}", summary.line());
    Ok(if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn checks(machine: &Machine) -> Vec<(&'static str, Command)> {
    let mut clippy = machine.cargo(&["clippy", "--release", "--workspace", "--all-targets"]);
    clippy.args(["--", "-D", "warnings"]);
    // Joined to the flags of .cargo/config.toml, which RUSTDOCFLAGS would replace. Programs are named like libraries,
    // whose pages they would take.
    let deny = "build.rustdocflags=['-D', 'warnings']";
    let doc = ["doc", "--release", "--workspace", "--no-deps", "--lib", "--config", deny];
    let mut checks = vec![
        ("format", cargo(&["fmt", "--all", "--check"])),
        ("lints", clippy),
        ("documentation", machine.cargo(&doc)),
    ];
    if machine.mpi {
        let check = machine.cargo_without_default_features(&["check", "--release", "--workspace"]);
        checks.push(("build without default features", check));
    }
    checks
}

fn test(machine: &Machine, full: bool, end: Instant, summary: &mut Summary) -> Result<()> {
    let skips = tempfile::NamedTempFile::new().context("failed to make a file for skips")?;
    let mut command = machine.cargo(&["test", "--release", "--workspace", "--no-fail-fast"]);
    command.env(SKIPS, skips.path()).env("OMP_NUM_THREADS", "1");
    if full {
        command.env("XTASK_FULL", "1").env("PROPTEST_CASES", "2000");
    }
    let passed = stream(&mut command, end, |line| summary.read_line(line))?;
    summary.read_skips(skips.path());
    if !passed && summary.failures.is_empty() {
        // A test did not compile, crashed its process, or ran past the deadline.
        summary.check(&line(&command), false);
    }
    Ok(())
}

/// Runs `command` and shows each line that it prints as it comes; whether it succeeded before `end`.
fn stream(command: &mut Command, end: Instant, mut read: impl FnMut(&str)) -> Result<bool> {
    let words = line(command);
    eprintln!("$ {words}");
    let mut child = command
        .current_dir(&*ROOT)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start `{words}`"))?;
    let out = child.stdout.take().context("no output to read")?;
    // The process is ended from another thread, which also ends what this one reads.
    let waited =
        std::thread::spawn(move || wait_within(&mut child, end.saturating_duration_since(Instant::now())));
    let mut terminal = std::io::stdout();
    for bytes in BufReader::new(out).split(b'\n') {
        let bytes = bytes.context("failed to read what a command prints")?;
        let text = String::from_utf8_lossy(&bytes);
        writeln!(terminal, "{text}")?;
        read(&text);
    }
    let status = waited.join().ok().context("failed to wait for a command")??;
    if status.is_none() {
        println!("`{words}` was ended at the deadline; --minutes sets another");
    }
    Ok(status.is_some_and(|status| status.success()))
}
