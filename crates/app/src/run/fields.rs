//! The samples of a run, and what they are scaled by.

use std::ops::Range;

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_data::{InMemory, Normalizer, Statistics, Window, split_validation};
use isobar_train::SampleFingerprint;
use isobar_train::config::{DataConfig, Predict};
use tch::{Device, Kind, Tensor};

use super::alike;
use super::source::{Source, as_str};
use crate::exit::{Because, Exit};

/// Samples in memory: this rank's window of them.
pub(crate) struct Fields {
    pub(crate) train: InMemory,
    pub(crate) validation: InMemory,
    /// Of trajectories, for validation over several steps.
    pub(crate) rollouts: Option<InMemory>,
    /// Of the inputs, over the training samples.
    pub(crate) input: Normalizer,
    /// Of the targets, over the training samples.
    pub(crate) target: Normalizer,
    /// Scales of changes from frame to frame, over the training samples, if the network predicts changes.
    pub(crate) change: Option<Normalizer>,
    /// The window, a range for each spatial dim.
    window: Vec<Range<usize>>,
}

impl Fields {
    /// Reads this rank's window. Every rank calls and reads by itself, maybe of a file of its own; all must find the same samples.
    pub(crate) fn read_alike(
        source: &Source,
        config: &DataConfig,
        window: &[Range<usize>],
        options: (Kind, Device),
        world: &Group,
    ) -> Result<Self> {
        let own = Self::read(source, config, window, options);
        let own =
            own.and_then(|fields| Ok((serde_json::to_vec(&fields.fingerprint(&source.extents())?)?, fields)));
        let (fields, all) = alike(world, own)?;
        let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
        let all = all.collect::<Result<Vec<SampleFingerprint>, _>>()?;
        match SampleFingerprint::difference(&all) {
            None => Ok(fields),
            Some((rank, other, difference)) => bail!(Exit::Mismatch.because(format!(
                "ranks {rank} and {other} read different data: {difference}; give all ranks the same file (--set data.path=FILE)"
            ))),
        }
    }

    fn read(
        source: &Source,
        config: &DataConfig,
        window: &[Range<usize>],
        (kind, device): (Kind, Device),
    ) -> Result<Self> {
        let (mut train, validation) = split_validation(source.samples(), config.validation_samples)?;
        if let Some(asked) = config.train_samples {
            train.end = asked.min(train.end);
        }
        let (inputs, targets) = (as_str(&source.inputs), as_str(&source.targets));
        let normalizer = |names: &[&str]| -> Result<Normalizer> {
            Ok(Normalizer::of_channels(&source.data.statistics(names, train.clone())?)?)
        };
        let input = normalizer(&inputs)?;
        let Some(times) = source.data.times() else {
            let load = |samples: &Range<usize>| -> Result<InMemory> {
                let samples: Vec<usize> = samples.clone().collect();
                let read = |names: &[&str]| -> Result<Tensor> {
                    Ok(source.data.read(&Window::still(window), &samples, names)?.f_select(1, 0)?)
                };
                Ok(InMemory::pairs(read(&inputs)?, read(&targets)?)?.to(device, kind)?)
            };
            return Ok(Self {
                input,
                target: normalizer(&targets)?,
                train: load(&train)?,
                validation: load(&validation)?,
                rollouts: None,
                change: None,
                window: window.to_vec(),
            });
        };
        let change = match config.predict {
            Predict::Frame => None,
            Predict::Change => {
                Some(change_scales(&source.data.change_statistics(&inputs, train.clone())?, &input)?)
            }
        };
        let load = |trajectories: Range<usize>| -> Result<Tensor> {
            let trajectories: Vec<usize> = trajectories.collect();
            let window = Window { frames: 0..times.len(), points: window.to_vec() };
            let all = source.data.read(&window, &trajectories, &inputs)?;
            Ok(all.f_to_device(device)?.f_to_kind(kind)?)
        };
        let (train, validation) = (load(train)?, load(validation)?);
        let steps = config.validation_steps;
        let rollouts = (steps > 1)
            .then(|| InMemory::rollouts(&validation, steps, steps)?.with_times(times))
            .transpose()?;
        Ok(Self {
            target: input.clone(),
            input,
            train: InMemory::rollouts(&train, config.train_steps, 1)?.with_times(times)?,
            validation: InMemory::rollouts(&validation, 1, 1)?.with_times(times)?,
            rollouts,
            change,
            window: window.to_vec(),
        })
    }

    fn fingerprint(&self, extents: &[usize]) -> Result<SampleFingerprint> {
        let (train, validation) = (&self.train, &self.validation);
        let extents = extents.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let description = format!(
            "{} + {} samples of {extents} with targets of mean {:.6e} and standard deviation {:.6e}",
            train.len(),
            validation.len(),
            self.target.mean()[0],
            self.target.std()[0],
        );
        Ok(SampleFingerprint::new(description, &self.window, &[train, validation])?)
    }
}

/// Returns the scales of changes from frame to frame. Each channel's changes are measured by their root mean square, in
/// units of the deviation of its values; the channel that changes most keeps the scale of its values, and the others are
/// scaled up to it. So all changes count alike, and one channel alone is scaled as its values are. A channel that never
/// changes keeps the scale of its values.
fn change_scales(changes: &[Statistics], values: &Normalizer) -> Result<Normalizer> {
    let rate = |(change, std): (&Statistics, &f64)| change.mean.hypot(change.std) / std;
    let rates: Vec<f64> = changes.iter().zip(values.std()).map(rate).collect();
    let fastest = rates.iter().copied().fold(0.0, f64::max);
    let scale = |(rate, std): (&f64, &f64)| if *rate > 0.0 { std * (rate / fastest) } else { *std };
    let scales: Vec<f64> = rates.iter().zip(values.std()).map(scale).collect();
    Ok(Normalizer::of_scales(&scales)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_all_channels_count_alike() {
        let values = Normalizer::of_scales(&[2.0, 100.0, 5.0]).unwrap();
        let changes = [(0.0, 0.5), (3.0, 4.0), (0.0, 0.0)];
        let changes = changes.map(|(mean, std)| Statistics { count: 8, mean, std, min: 0.0, max: 1.0 });
        // A quarter of the deviation, a twentieth, and none.
        assert_eq!(change_scales(&changes, &values).unwrap().std(), [2.0, 20.0, 5.0]);
        let one = Normalizer::of_scales(&[2.0]).unwrap();
        assert_eq!(change_scales(&changes[..1], &one).unwrap().std(), [2.0], "as its values");
    }
}
