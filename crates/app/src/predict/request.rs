//! The samples and steps that a command line asks for.

use anyhow::{Result, bail};

use super::{Predict, samples};
use crate::run::Source;
use isobar_command::exit::{Because, Exit};

/// Most steps of a prediction: times, errors and metrics of all steps are kept until the end.
const MOST_STEPS: usize = 1 << 20;

impl Predict<'_> {
    /// The samples that are asked for, or those kept for validation.
    pub(super) fn samples(&self, source: &Source) -> Result<Vec<usize>> {
        let there = source.samples();
        let Some(ranges) = &self.args.samples else {
            let kept: Vec<usize> = source.parts.predicted().samples.clone().collect();
            if kept.is_empty() {
                bail!(Exit::Usage.because("no samples to predict; select some with --samples"));
            }
            return Ok(kept);
        };
        if let Some(range) = ranges.iter().find(|range| *range.end() >= there) {
            bail!(Exit::Usage.because(format!(
                "sample {} is asked for; {} has {there}, from 0 to {}",
                range.end(),
                source.path(),
                there.saturating_sub(1)
            )));
        }
        let samples: Vec<usize> = ranges.iter().cloned().flatten().collect();
        match samples::repeated(&samples) {
            None => Ok(samples),
            Some(sample) => {
                bail!(Exit::Usage.because(format!("--samples has {sample} twice; give each sample once")))
            }
        }
    }

    /// Initial frame and number of steps to predict; 0 for samples without time.
    pub(super) fn steps(&self, source: &Source) -> Result<(usize, usize)> {
        let args = self.args;
        let Some(times) = source.data.times() else {
            if args.start.is_some_and(|start| start != 0) || args.steps.is_some_and(|steps| steps != 1) {
                bail!(Exit::Usage.because(format!(
                    "samples of {} have no steps: omit --start and --steps",
                    source.path()
                )));
            }
            return Ok((0, 0));
        };
        let (first, last) = (self.config.data.history - 1, times.len() - 1);
        let start = args.start.unwrap_or(first);
        if start > last {
            bail!(Exit::Usage.because(format!(
                "--start is {start}, but {} has the frames 0 to {last}; --start={}",
                source.path(),
                first.min(last)
            )));
        }
        let members = self.config.task.members();
        let steps = args.steps.unwrap_or(if members > 1 { 1 } else { last.saturating_sub(start) });
        if steps > MOST_STEPS {
            bail!(Exit::Usage.because(format!("--steps is {steps}, expected at most {MOST_STEPS}")));
        }
        if members > 1 && steps > 1 {
            bail!(Exit::Usage.because(format!(
                "[task] has {members} members, and {steps} steps are requested: ensembles are of one step; --steps=1, or --set \
                 task.members=1"
            )));
        }
        if steps == 0 {
            bail!(Exit::Usage.because(format!(
                "the number of steps from frame {start} is 0, expected 1 or more: {} has the frames 0 to {last}; start earlier, or give the number of \
                 steps, as in --steps=1",
                source.path()
            )));
        }
        if start < first {
            bail!(Exit::Usage.because(format!(
                "--start={start} has {start} frames before it, but data.history is {}: --start={first} or later",
                first + 1
            )));
        }
        // A step takes the forcings of the frame that it starts from.
        let known = last - start + 1;
        if steps > known && !source.names.forcings.is_empty() {
            bail!(Exit::Usage.because(format!(
                "{steps} steps from frame {start} need more frames than {} has of the forcings {:?}; use --steps={known}",
                source.path(),
                source.names.forcings
            )));
        }
        Ok((start, steps))
    }
}
