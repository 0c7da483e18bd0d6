//! `cargo xtask setup`: what a machine needs before the workspace builds.

use std::process::Command;

use anyhow::Result;
use clap::Args;
use isobar_harness::on_path;

use crate::{
    libtorch::{self, Set},
    packages::{self, Available},
    run::{self as command, ROOT, cargo},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Install the CUDA libraries of PyTorch too (4.7 GB)
    #[arg(long)]
    pub(crate) cuda: bool,
    /// Install no system packages; go on without MPI, HDF5 and SLURM where they are missing
    #[arg(long)]
    pub(crate) no_system: bool,
}

/// A machine on which the workspace builds.
pub(crate) struct Machine {
    /// Whether the MPI backend is built.
    pub(crate) mpi: bool,
    /// The features that every cargo command needs here.
    pub(crate) features: Vec<&'static str>,
}

/// Installs what is missing, and says what is here.
pub(crate) fn run(options: &Options) -> Result<Machine> {
    let available = packages::install(!options.no_system)?;
    libtorch::install(if options.cuda { Set::Cuda } else { Set::Cpu })?;
    let machine = Machine::of(available);
    if !machine.features.is_empty() {
        eprintln!("on this machine plain cargo needs: {}", machine.features.join(" "));
    }
    eprintln!("set up in {}", ROOT.display());
    Ok(machine)
}

/// Installs the parts of the tool chain that checks need, where rustup has them apart.
pub(crate) fn components() -> Result<()> {
    for (component, command) in [("rustfmt", "fmt"), ("clippy", "clippy")] {
        let there = cargo(&[command, "--version"]).output().is_ok_and(|output| output.status.success());
        if !there && on_path("rustup").is_some() {
            command::run(Command::new("rustup").current_dir(&*ROOT).args(["component", "add", component]))?;
        }
    }
    Ok(())
}

impl Machine {
    fn of(available: Available) -> Self {
        let mut features = Vec::new();
        if !available.mpi {
            features.push("--no-default-features");
        }
        if !available.hdf5 {
            features.push("--features=isobar-data/hdf5-static");
        }
        Self { mpi: available.mpi, features }
    }
}
