//! `cargo xtask demo`: trains a neural operator on two ranks, from nothing.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::{
    run::{ROOT, line, run as run_command},
    setup,
};

const RANKS: usize = 2;
const CONFIGURATION: &str = "configs/darcy_afno.toml";
/// The program in the profile of the tests, whose artefacts it shares.
const PROGRAM: &str = "target/debug/isobar";
/// The name of the run.
const NAME: &str = "demo";

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    setup: setup::Options,
    /// Arguments for `isobar train`, after `--`
    #[arg(last = true)]
    train: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = setup::run(&options.setup)?;
    run_command(&mut machine.cargo(&["build", "--package", "isobar-cli"]))?;
    let data = data()?;
    let mut arguments = vec!["train".to_owned(), CONFIGURATION.to_owned()];
    arguments.extend(["--set".to_owned(), format!("data.path={}", data.display())]);
    // Shorter than the configuration, to show what it does.
    arguments.extend(["--set", "train.epochs=60"].map(str::to_owned));
    // In a folder of its own: an interrupted demo goes on from its last checkpoint, and one that is done shows its results
    // again; `--overwrite` after `--` ranks above it.
    let name = format!("run.name={NAME}");
    arguments.extend(["--set", &name, "--set", "checkpoint.resume=auto"].map(str::to_owned));
    arguments.extend(options.train.iter().cloned());
    if machine.mpi {
        let mut mpirun = Command::new("mpirun");
        mpirun.current_dir(&*ROOT).env("OMP_NUM_THREADS", "1");
        // Open MPI refuses to start ranks as root otherwise, and more ranks than cores.
        mpirun.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        // Between SIGTERM and SIGKILL there is time to save.
        mpirun
            .args(["--oversubscribe", "--mca", "odls_base_sigkill_timeout", "5", "-n", &RANKS.to_string()])
            .arg(program())
            .args(&arguments);
        run_command(&mut mpirun)?;
    } else {
        eprintln!("without MPI: {RANKS} plain processes over gloo");
        run_plain(&arguments)?;
    }
    print_next_steps(&data);
    Ok(())
}

/// The data set beside the project where it is there, else one solved here, once.
fn data() -> Result<PathBuf> {
    let shared = ROOT.join("../shared/data/darcy_64.h5");
    if shared.exists() {
        return Ok(shared);
    }
    let own = ROOT.join("runs/data/darcy_64.h5");
    if !own.exists() {
        run_command(Command::new(program()).current_dir(&*ROOT).args(["data", "darcy", "--out"]).arg(&own))?;
    }
    Ok(own)
}

fn run_plain(arguments: &[String]) -> Result<()> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port().to_string();
    let mut children: Vec<(String, Child)> = Vec::new();
    for rank in 0..RANKS {
        let mut command = Command::new(program());
        command.current_dir(&*ROOT).env("OMP_NUM_THREADS", "1").args(arguments);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port);
        let words = line(&command);
        eprintln!("$ RANK={rank} WORLD_SIZE={RANKS} {words}");
        children.push((words, command.spawn().context("failed to start a rank")?));
    }
    for (words, mut child) in children {
        let status = child.wait()?;
        ensure!(status.success(), "`{words}` failed ({status})");
    }
    Ok(())
}

fn program() -> PathBuf {
    ROOT.join(PROGRAM)
}

/// Prints commands that go on from here, all of which work in the root of the workspace.
fn print_next_steps(data: &Path) {
    let data = data.display();
    println!(
        "\nnext, in {}:\n  \
         {PROGRAM} predict {CONFIGURATION} --set data.path={data} --set run.name={NAME}    # fields of the best checkpoint\n  \
         {PROGRAM} checkpoint ls runs/{NAME}\n  \
         cargo build --release -p isobar-cli    # target/release/isobar, fully optimized: for runs of your own",
        ROOT.display()
    );
}
