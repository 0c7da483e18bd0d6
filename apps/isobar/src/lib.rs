//! The command `isobar`: trains, predicts, verifies and measures. It puts the crates of the workspace together and has no logic of
//! its own that a program of yours would want.

mod bench;
mod check;
mod checkpoint;
mod cli;
mod config;
mod data;
mod exit;
mod launch;
mod predict;
mod run;
mod start;
mod terminal;
mod trace;
mod train;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use exit::Exit;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors.
            let exit = if error.use_stderr() { Exit::Usage } else { Exit::Good };
            let _ = error.print();
            return exit.into();
        }
    };
    match &cli.command {
        Command::Train(args) => ended(train::command(args)),
        Command::Predict(args) => ended(predict::command(args)),
        Command::Data(command) => ended(data::run(command)),
        Command::Config(command) => ended(config::run(command)),
        Command::Check(args) => ended(check::run(args)),
        Command::Checkpoint(command) => ended(checkpoint::run(command)),
        Command::Bench(args) => ended(bench::run(args)),
        Command::Launch(args) => ended(launch::run(args)),
        Command::Verify(args) => ended(verify::run(args)),
        Command::Trace(command) => ended(trace::run(command)),
        Command::VerifyRank(args) => ended(verify::run_rank(args)),
    }
}

/// The code with which the process ends; an error is told, to the other ranks too.
fn ended(result: anyhow::Result<impl Into<ExitCode>>) -> ExitCode {
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            let text = exit::text(&error);
            terminal::complain(&format!("error: {text}"));
            isobar_manager::DistributedManager::leave(&text);
            exit::of(&error).into()
        }
    }
}
