//! `isobar data`: data sets solved here.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use isobar_data::DarcyFile;
use isobar_data::generate::{DarcyOptions, darcy};

use crate::exit::{Because, Exit};
use crate::terminal;

/// The data sets.
#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Solve Darcy flow for random coefficients and write it as HDF5
    ///
    /// Each sample is a coefficient a, 12 or 3 by the sign of a Gaussian random field, and the solution u of
    /// -div(a grad u) = 1 on the unit square with u = 0 on its boundary. The file has PDEBench's layout: datasets `nu` and
    /// `tensor`, coordinates, the attribute `beta`. The same seed gives the same samples.
    #[command(after_long_help = "\
Example:
  isobar data darcy --out data/darcy.h5 --samples 512 --size 64 --seed 1")]
    Darcy(DarcyArgs),
}

/// Arguments of `isobar data darcy`.
#[derive(Debug, Args)]
pub(crate) struct DarcyArgs {
    /// The file to write; folders that are missing are made
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Number of samples
    #[arg(long, default_value_t = 256)]
    samples: usize,
    /// Cells along each side of the square
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Seed of the coefficients
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads that solve; all cores where not given
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

/// Runs the command.
pub(crate) fn run(command: &DataCommand) -> Result<Exit> {
    let DataCommand::Darcy(args) = command;
    let options =
        DarcyOptions { samples: args.samples, size: args.size, seed: args.seed, threads: args.threads };
    if let Some(folder) = args.out.parent() {
        std::fs::create_dir_all(folder).map_err(|error| {
            Exit::Data.because(format!("cannot make the folder {}: {error}", folder.display()))
        })?;
    }
    let bar = ProgressBar::new(args.samples as u64);
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} samples, {eta} left")?);
    darcy(&options, &args.out, |ready| bar.set_position(ready as u64)).map_err(|error| match error {
        isobar_data::Error::Invalid(what) => Exit::Usage.because(what).into(),
        error => anyhow::Error::from(error),
    })?;
    bar.finish_and_clear();
    let file = DarcyFile::open(&args.out).context("the file that was written cannot be read")?;
    let statistics = file.statistics(0..file.len())?;
    terminal::line(&format!(
        "{}: {} samples of {} x {} cells; u has mean {:.5}, standard deviation {:.5}",
        args.out.display(),
        file.len(),
        file.rows(),
        file.cols(),
        statistics.u.mean,
        statistics.u.std
    ));
    Ok(Exit::Good)
}
