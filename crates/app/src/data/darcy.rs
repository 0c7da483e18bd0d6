//! `isobar data darcy`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use isobar_data::DarcyFile;
use isobar_data::generate::{DarcyOptions, darcy};

use super::{bar, mended};
use isobar_command::exit::Exit;
use isobar_command::{outputs, terminal};

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
pub(super) fn run(args: &DarcyArgs) -> Result<Exit> {
    let options =
        DarcyOptions { samples: args.samples, size: args.size, seed: args.seed, threads: args.threads };
    outputs::check("--out", &[&args.out], &[])?;
    outputs::make_parent(&args.out)?;
    let bar = bar(args.samples as u64, "samples")?;
    darcy(&options, &args.out, |ready| bar.set_position(ready as u64)).map_err(mended)?;
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
