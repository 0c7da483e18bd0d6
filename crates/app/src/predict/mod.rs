//! `isobar predict`: predictions of a trained network for the fields of a data set.
//!
//! It trains nothing: parameters come from a checkpoint.

mod divergence;
mod fields;
mod files;
mod origin;
mod outcome;
mod output;
mod report;
mod request;
mod rounds;
mod samples;
mod sharing;
mod spectra;
#[cfg(test)]
mod tests;
mod trained;
mod truth;
mod windows;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use isobar_manager::config::{Resolved, agree};
use isobar_manager::{DistributedManager, logging};
use isobar_train::{FieldLayout, Forward};

use self::fields::{Out, Prediction};
use self::report::Report;
use crate::config::{Config, ConfigArgs};
use crate::run::{self, Job, PER_RANK_KEYS, Run, Scoring};
use isobar_command::exit::Exit;
use isobar_command::{start, terminal};

/// Arguments of `isobar predict`.
#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// `best`, `latest`, or a checkpoint's folder; by default the best, or the latest if there is no best.
    /// `best` and `latest` skip incomplete checkpoints
    #[arg(long, value_name = "WHICH")]
    checkpoint: Option<String>,
    /// Numbers of samples or trajectories of the data file, from 0, as `0,3,5` or `0-3,7`; by default those kept for validation
    #[arg(long, value_name = "NUMBERS", allow_negative_numbers = true, value_delimiter = ',', value_parser = samples::parse)]
    samples: Option<Vec<RangeInclusive<usize>>>,
    /// Initial frame, for trajectories; by default the first one that has the frames of `data.history` before it
    #[arg(long, value_name = "FRAME", allow_negative_numbers = true)]
    start: Option<usize>,
    /// Number of steps, for trajectories; by default up to the file's last frame, or 1 for an ensemble. May be larger
    #[arg(long, value_name = "STEPS", allow_negative_numbers = true)]
    steps: Option<usize>,
    /// The file to write: HDF5 in the layout of the data, plain HDF5 if that layout has no NaN and the forecast has, or with the extension .nc NetCDF-4 or .zarr Zarr with the conventions of CF; by default
    /// prediction.h5 in the folder of the run. Pictures, a table of the errors after each step (CSV), metrics and spectra
    /// get the same name
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn command(args: &PredictArgs) -> Result<Exit> {
    let resolved = args.config.load(&[])?;
    let config = &resolved.value;
    let manager = start::for_run(&config.distributed, &config.run.folder())?;
    logging::init(&config.distributed.log, manager.rank(), None)?;
    let exit = predict(&manager, &resolved, args)?;
    // A rank that exits with another code than 0 may end the job, so all wait until rank 0 has written and printed.
    DistributedManager::cleanup(true)?;
    Ok(exit)
}

fn predict(manager: &DistributedManager, resolved: &Resolved<Config>, args: &PredictArgs) -> Result<Exit> {
    agree(resolved, &manager.group(None)?, &PER_RANK_KEYS)?;
    let config = &resolved.value;
    config.data.check()?;
    config.check_task()?;
    let Finished { lines, diverged } = run::with(manager, config, Predict { config, args })?;
    if manager.rank() == 0 {
        lines.iter().for_each(|line| terminal::line(line));
        diverged.iter().for_each(|text| tracing::error!("{text}"));
    }
    Ok(if diverged.is_none() { Exit::Good } else { Exit::Failed })
}

/// A finished prediction.
struct Finished {
    /// Lines to print.
    lines: Vec<String>,
    /// Message that names the samples and steps that are not finite, the same on all ranks; `None` if all are finite.
    diverged: Option<String>,
}

/// Job of `isobar predict`.
struct Predict<'a> {
    config: &'a Config,
    args: &'a PredictArgs,
}

impl Job for Predict<'_> {
    type Out = Finished;
    const TRAINS: bool = false;

    fn goes_on_from(&self) -> Option<PathBuf> {
        match self.args.checkpoint.as_deref() {
            Some("best" | "latest") | None => Some(self.config.run.folder()),
            Some(path) => Some(path.into()),
        }
    }

    fn run<L, F>(self, run: Run<L, F>) -> Result<Self::Out>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
    {
        let trained = self.trained(run)?;
        let (source, world) = (&trained.source, &trained.ranks.world);
        let samples = self.samples(source)?;
        let files = self.files(source)?;
        let (start, steps) = self.steps(source)?;
        let prediction = Prediction {
            source,
            samples: &samples,
            start,
            steps,
            name: format!("{} by {}", source.data.name(), self.config.run.name),
            legend: source.legend(self.config.data.points.as_deref())?,
        };
        prediction.check_times()?;
        let scoring = Scoring::new(source, self.config, &trained.target_window, world)?;
        let attributes = [trained.origin.attributes(), prediction.attributes()].concat();
        let out = Out { path: &files.out, attributes: &attributes, plain: false };
        let outcome = trained.predict(&prediction, out, &scoring)?;

        let report = Report::new(&trained, &prediction, &outcome, &scoring);
        let mut lines = vec![trained.origin.line(), prediction.line()];
        lines.extend(report.lines());
        if world.rank() == 0 {
            report.warn();
            lines.extend(report.write(&files)?);
        }
        Ok(Finished { lines, diverged: prediction.diverged(&outcome.divergence, &trained.model.variables) })
    }
}
