//! The command `isobar`: trains, predicts, verifies and measures. It puts the crates of the workspace together and has no logic of
//! its own that a program of yours would want.

mod check;
mod checkpoint;
mod cli;
mod config;
mod data;
mod plan;
mod predict;
mod run;
mod trace;
mod train;
mod unused;

use std::process::ExitCode;

use isobar_data::Format;
use isobar_manager::printable;
use isobar_models::Architecture;
use isobar_train::Registered;
use isobar_train::loss::Loss;
use isobar_train::metric::Metric;
use isobar_train::objective::Objective;
use isobar_train::optim::OptimizerConfig;
use isobar_train::schedule::LrSchedule;

use cli::{Cli, Command};
use isobar_command::exit::{self, Because, Exit};
use isobar_command::terminal;

/// The command line as a library: the command `isobar` with a program's own models, data formats, training tasks, losses, metrics,
/// optimizers and schedules, which its TOML files name.
///
/// ```no_run
/// fn main() -> std::process::ExitCode {
///     isobar_app::App::new().main()
/// }
/// ```
#[derive(Debug, Default)]
pub struct App(());

impl App {
    /// Makes the command with the built-in models and data formats, and those that linked crates register.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model. One that registers itself (`isobar_models::register!`) need not be added.
    #[must_use]
    pub fn model<C: Architecture>(self) -> Self {
        isobar_models::register::<C>();
        self
    }

    /// Adds a data format. One that registers itself (`isobar_data::register!`) need not be added.
    #[must_use]
    pub fn dataset<F: Format>(self) -> Self {
        isobar_data::register::<F>();
        self
    }

    /// Adds an optimizer. One that registers itself (`isobar_train::register_optimizer!`) need not be added.
    #[must_use]
    pub fn optimizer<C: OptimizerConfig + Registered>(self) -> Self {
        isobar_train::optim::register::<C>();
        self
    }

    /// Adds a learning-rate schedule. One that registers itself (`isobar_train::register_schedule!`) need not be added.
    #[must_use]
    pub fn schedule<S: LrSchedule + Registered>(self) -> Self {
        isobar_train::schedule::register::<S>();
        self
    }

    /// Adds a training task. One that registers itself (`isobar_train::register_task!`) need not be added.
    #[must_use]
    pub fn task<O: Objective + Registered>(self) -> Self {
        isobar_train::objective::register::<O>();
        self
    }

    /// Adds a loss. One that registers itself (`isobar_train::register_loss!`) need not be added.
    #[must_use]
    pub fn loss<L: Loss + Registered>(self) -> Self {
        isobar_train::loss::register::<L>();
        self
    }

    /// Adds a metric. One that registers itself (`isobar_train::register_metric!`) need not be added.
    #[must_use]
    pub fn metric<M: Metric + Registered>(self) -> Self {
        isobar_train::metric::register::<M>();
        self
    }

    /// Runs the command line of this process. At exit, `atexit` handlers that were registered before and destructors of static objects
    /// of C++ are skipped (see [`isobar_torch::skip_static_destructors`]).
    pub fn main(self) -> ExitCode {
        run_command()
    }
}

fn run_command() -> ExitCode {
    isobar_torch::skip_static_destructors();
    isobar_manager::make_file_limit_an_error();
    let cli = match Cli::read(&std::env::args_os().collect::<Vec<_>>()) {
        Ok(cli) => cli,
        Err(error) => {
            if !error.use_stderr() {
                // Help and version are no errors.
                let _ = error.print();
                return Exit::Good.into();
            }
            let text = error.to_string();
            let shown = if terminal::colours() { error.render().ansi().to_string() } else { text.clone() };
            report(shown.trim_end(), text.trim_end(), joins());
            return Exit::Usage.into();
        }
    };
    if matches!(cli.command, Command::Predict(_) | Command::Data(_) | Command::Checkpoint(_))
        && let Err(error) = isobar_manager::remove_partial_outputs()
    {
        return ended::<Exit>(Err(error.into()));
    }
    match &cli.command {
        Command::Train(args) => ended(train::command(args)),
        Command::Plan(args) => ended(plan::command(args)),
        Command::Predict(args) => ended(predict::command(args)),
        Command::Data(command) => ended(data::run(command)),
        Command::Config(command) => ended(config::run(command)),
        Command::Check(args) => ended(check::run(args)),
        Command::Checkpoint(command) => ended(checkpoint::run(command)),
        Command::Bench(args) => ended(isobar_bench::run(args)),
        Command::Launch(args) => ended(isobar_launcher::run(args)),
        Command::Verify(args) => ended(isobar_verify::run(args)),
        Command::Trace(command) => ended(trace::run(command)),
        Command::VerifyRank(args) => ended(isobar_verify::run_rank(args)),
    }
}

/// Single-process commands, which join no ranks.
const ALONE: [&str; 7] = ["checkpoint", "config", "data", "launch", "plan", "trace", "verify"];

/// Returns whether the command of this process joins the ranks of its launch.
fn joins() -> bool {
    let command = std::env::args().nth(1);
    command.is_none_or(|command| !ALONE.contains(&command.as_str()))
}

/// Returns the exit code of the process; prints an error once for all ranks that share it.
fn ended<E: Into<ExitCode>>(result: anyhow::Result<E>) -> ExitCode {
    let written = || match terminal::failure() {
        None => Ok(()),
        Some(why) => Err(Exit::Data.because(format!("standard output is incomplete: {why}"))),
    };
    match result.and_then(|exit| Ok(written().map(|()| exit)?)) {
        Ok(exit) => exit.into(),
        Err(error) => {
            let text = exit::text(&error);
            report(&format!("error: {}", printable(&text)), &text, joins());
            exit::of(&error).into()
        }
    }
}

/// Prints an error, and sends it to the other ranks if the command has any.
fn report(shown: &str, text: &str, joins: bool) {
    if joins {
        isobar_manager::report_text(shown, text);
    } else {
        terminal::complain(shown);
    }
}
