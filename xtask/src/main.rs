//! `cargo xtask`: set-up, demo, tests, benchmarks, and a SLURM of one machine.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program of the terminal")]

mod bench;
mod demo;
mod libtorch;
mod packages;
mod published;
mod reference;
mod run;
mod setup;
mod test;
mod xarray;

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use isobar_harness::{Slurm, SlurmState};

/// Everything around the code: set-up, demo, tests, benchmarks.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what is missing: system packages, libtorch
    Setup(setup::Options),
    /// Set up, build, and train a neural operator on two ranks
    Demo(demo::Options),
    /// Set up, then everything that CI runs
    Test(test::Options),
    /// Time Isobar beside PhysicsNeMo, PyTorch, DTensor, FFTW and readers of files, and print the table of ratios
    Bench(bench::Options),
    /// Train models of published results on their data, and print what they reach beside what was published
    Published(published::Options),
    /// Write configs/reference.toml, and the tables of docs/configuration.md and docs/operators.md
    Reference,
    /// A SLURM of this one machine, in target/slurm
    Slurm {
        #[command(subcommand)]
        action: SlurmAction,
    },
}

#[derive(Subcommand)]
enum SlurmAction {
    /// Start what is not running
    Start,
    /// Stop the daemons and the jobs
    Stop,
    /// Say whether it takes jobs; exit code 1 if it does not
    Status,
    /// Run a command against it, such as `srun -n 2 --overcommit --mpi=pmix PROGRAM`
    Run {
        /// The command and its arguments, after `--`
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

/// Exit codes: 0 good, 1 something failed, 2 the machine lacks what only its owner can install.
fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Setup(options) => setup::run(&options).map(|_| ExitCode::SUCCESS),
        Task::Demo(options) => demo::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Test(options) => test::run(&options),
        Task::Bench(options) => bench::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Published(options) => published::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Reference => reference::run().map(|()| ExitCode::SUCCESS),
        Task::Slurm { action } => slurm(&action),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(if error.is::<packages::Missing>() { 2 } else { 1 })
    })
}

fn slurm(action: &SlurmAction) -> Result<ExitCode> {
    let slurm = Slurm::of_workspace();
    match action {
        SlurmAction::Start => {
            slurm.start()?;
            println!("SLURM is up; for its commands: export SLURM_CONF={}", slurm.configuration().display());
        }
        SlurmAction::Stop => slurm.stop()?,
        SlurmAction::Status => {
            let state = slurm.state();
            println!("{state}");
            if state != SlurmState::Up {
                return Ok(ExitCode::FAILURE);
            }
        }
        SlurmAction::Run { command } => {
            slurm.start()?;
            let [program, args @ ..] = command.as_slice() else { bail!("no command given") };
            let status = slurm.command(&program.to_string_lossy()).args(args).status();
            let status = status.with_context(|| format!("failed to start {}", program.display()))?;
            return Ok(ExitCode::from(status.code().and_then(|code| code.try_into().ok()).unwrap_or(1)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        super::Cli::command().debug_assert();
    }
}
