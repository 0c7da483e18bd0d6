//! The command `isobar`: trains, predicts, verifies and measures. It puts the crates of the workspace together and has no logic of
//! its own that a program of yours would want.

mod bench;
mod checkpoint;
mod cli;
mod config;
mod data;
mod exit;
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
    let result = match &cli.command {
        Command::Train(args) => train::command(args),
        Command::Predict(args) => predict::command(args),
        Command::Data(command) => data::run(command),
        Command::Config(command) => config::run(command),
        Command::Checkpoint(command) => checkpoint::run(command),
        Command::Bench(args) => bench::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Trace(command) => trace::run(command),
        Command::VerifyRank(args) => verify::run_rank(args),
    };
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
