//! `cargo xtask setup`: what a machine needs before the workspace builds.

use std::{env, path::PathBuf, process::Command};

use anyhow::Result;
use clap::Args;
use isobar_harness::on_path;

use crate::{
    libtorch::{self, Set},
    packages::{self, Available},
    run::{self as command, ROOT, cargo},
    xarray,
};

const NO_DEFAULT: &str = "--no-default-features";
const HDF5_NEEDS_CMAKE: (u32, u32) = (3, 26);

// No group: each task that flattens these has one of the same name.
#[derive(Args)]
#[group(skip)]
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
    /// True if the MPI backend is built.
    pub(crate) mpi: bool,
    /// The features that every cargo command needs here.
    features: Vec<&'static str>,
    /// Path of our own CMake, if the machine's is missing or too old to build HDF5.
    cmake: Option<PathBuf>,
}

/// Installs what is missing, and says what is here.
pub(crate) fn run(options: &Options) -> Result<Machine> {
    let available = packages::install(!options.no_system)?;
    libtorch::install(if options.cuda { Set::Cuda } else { Set::Cpu })?;
    let machine = Machine::of(available)?;
    if !machine.features.is_empty() {
        let features = machine.features.join(" ");
        let path =
            machine.cmake.as_ref().map_or(String::new(), |cmake| format!("PATH={}:$PATH ", cmake.display()));
        eprintln!("on this machine plain cargo needs this too: {path}cargo build {features}");
    }
    eprintln!("set up in {}", ROOT.display());
    Ok(machine)
}

/// Installs what checks need besides: the parts of the tool chain that rustup has apart, and xarray.
pub(crate) fn components() -> Result<()> {
    xarray::install();
    for (component, command) in [("rustfmt", "fmt"), ("clippy", "clippy")] {
        let there = cargo(&[command, "--version"]).output().is_ok_and(|output| output.status.success());
        if !there && on_path("rustup").is_some() {
            command::run(Command::new("rustup").current_dir(&*ROOT).args(["component", "add", component]))?;
        }
    }
    Ok(())
}

impl Machine {
    /// `cargo` with these words, and what it needs on this machine.
    pub(crate) fn cargo(&self, words: &[&str]) -> Command {
        let mut command = cargo(words);
        command.args(&self.features);
        self.add_tools(&mut command);
        command
    }

    /// As [`Machine::cargo`], without the features of the default.
    pub(crate) fn cargo_without_default_features(&self, words: &[&str]) -> Command {
        let mut command = cargo(words);
        command.arg(NO_DEFAULT).args(self.features.iter().filter(|feature| **feature != NO_DEFAULT));
        self.add_tools(&mut command);
        command
    }

    fn of(available: Available) -> Result<Self> {
        let mut features = Vec::new();
        if !available.mpi {
            features.push(NO_DEFAULT);
        }
        let mut cmake = None;
        if !available.hdf5 {
            features.push("--features=isobar-data/hdf5-static");
            cmake = install_cmake()?;
        }
        Ok(Self { mpi: available.mpi, features, cmake })
    }

    fn add_tools(&self, command: &mut Command) {
        if let Some(cmake) = &self.cmake {
            let path = env::var_os("PATH").unwrap_or_default();
            let joined = env::join_paths([cmake.clone()].into_iter().chain(env::split_paths(&path)));
            command.env("PATH", joined.unwrap_or(path));
        }
    }
}

/// The folder of a CMake that can build HDF5, installed by pip; none where the machine's own can.
fn install_cmake() -> Result<Option<PathBuf>> {
    let version = Command::new("cmake").arg("--version").output();
    let version =
        version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let mut numbers =
        version.split_whitespace().nth(2).unwrap_or_default().split('.').map_while(|it| it.parse().ok());
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= HDF5_NEEDS_CMAKE {
        return Ok(None);
    }
    let folder = ROOT.join(".tools/cmake/data/bin");
    if !folder.join("cmake").exists() {
        command::run(
            command::pip().arg("--upgrade").arg("--target").arg(ROOT.join(".tools")).arg("cmake<5"),
        )?;
    }
    Ok(Some(folder))
}
