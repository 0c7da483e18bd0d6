//! The samples of a run, and what they are scaled by.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_data::{
    Cache, InMemory, Normalizer, Part, Parts, Reader, ReaderOptions, Samples, StreamOptions, Streamed,
    TargetWindow, TrainSteps,
};
use isobar_train::SampleFingerprint;
use isobar_train::config::{DataConfig, Predict};
use tch::{Device, Kind, Tensor};

use super::all_ok;
use super::part_window::PartWindows;
use super::place::Place;
use super::reading::Reading;
use super::roles::channels;
use super::room;
use super::scales::{Scales, check_same, scales_alike};
use super::source::Source;
use super::statics::Statics;
use isobar_command::exit::{Because, Exit};

/// Samples of a run: this rank's window of them, in memory or read while they are needed.
pub(crate) struct Fields {
    pub(crate) train: Box<dyn Samples>,
    pub(crate) validation: Box<dyn Samples>,
    /// Of trajectories, for validation over several steps.
    pub(crate) rollouts: Option<Box<dyn Samples>>,
    /// Of the inputs, over the training samples.
    pub(crate) input: Normalizer,
    /// Of the targets, over the training samples.
    pub(crate) target: Normalizer,
    /// Scales of changes from frame to frame, over the training samples, if the network predicts changes.
    pub(crate) change: Option<Normalizer>,
    /// Of the stored forcings, over the training samples.
    pub(crate) forcing: Option<Normalizer>,
    /// Of the stored static fields, over all points.
    pub(crate) statics: Option<Normalizer>,
    /// Reads the samples, unless they are in memory.
    pub(crate) reader: Option<Arc<Reader>>,
}

/// Samples of training, of validation, and rollouts of validation.
type Three<T> = (T, T, Option<T>);

impl Fields {
    /// Opens this rank's window of the samples, and reads it if it is kept in memory. Every rank calls and reads by itself, maybe
    /// of a file of its own; all must find the same samples.
    pub(crate) fn read_alike(
        source: &Source,
        config: &DataConfig,
        place: &Place<'_>,
        world: &Group,
    ) -> Result<Self> {
        let Parts { train, validation, .. } = &source.parts;
        let counts = [train, validation].map(|part| part.samples.len());
        let text = |extents: &[usize]| extents.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let mut extents = text(&source.extents());
        if source.has_own_targets() {
            extents += &format!(" and {}", text(&source.target_extents()));
        }
        let times = [train, validation].map(|part| part.data.times().unwrap_or_default().len());
        let frames = match source.has_steps() {
            true => format!("{} + {} frames of ", times[0], times[1]),
            false => String::new(),
        };
        let description = format!("{} + {} samples of {frames}{extents}", counts[0], counts[1]);
        let windows = match config.cache {
            Cache::All => {
                let of = |part: &Part| PartWindows::new(source, place, part);
                Some([of(train)?, of(validation)?])
            }
            Cache::None | Cache::Window => None,
        };
        if let Some(windows) = &windows {
            room::check_samples(world, windows, place)?;
        }
        let scales = scales_alike(source, train, (config, &description), (world, place))?;
        let (statics, _) = all_ok(world, Statics::normalizer(source).map(|statics| (Vec::new(), statics)))?;
        let scales = (scales, statics);
        let Some(windows) = windows else {
            let streamed = streamed(source, config, place, (train, validation));
            let (((train, validation, rollouts), reader), _) =
                all_ok(world, streamed.map(|streamed| (Vec::new(), streamed)))?;
            let rollouts = rollouts.map(|rollouts| Box::new(rollouts) as Box<dyn Samples>);
            let (train, validation) = (Box::new(train), Box::new(validation));
            return Ok(Self::of(train, validation, rollouts, scales, Some(reader)));
        };
        let values = read_all(&windows, place, world)?;
        let read = in_memory(source, config, values).and_then(|read| {
            let description = format!(
                "{description} with targets of mean {:.6e} and standard deviation {:.6e}",
                scales.0.target.mean()[0],
                scales.0.target.std()[0]
            );
            let windows = [place.window, place.target_window].concat();
            let own = SampleFingerprint::new(description, &windows, &[&read.0, &read.1])?;
            Ok((serde_json::to_vec(&own)?, read))
        });
        let ((train, validation, rollouts), all) = all_ok(world, read)?;
        let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
        check_same(&all.collect::<Result<Vec<SampleFingerprint>, _>>()?)?;
        Ok(Self::of(train.into(), validation.into(), rollouts.map(Into::into), scales, None))
    }

    /// Makes this rank's window of the samples, all values one, with normalizers of scale 1, and reads nothing. Samples take memory
    /// only if they would be kept on the device.
    pub(crate) fn planned(
        source: &Source,
        config: &DataConfig,
        [window, target_window]: [&[Range<usize>]; 2],
        (kind, device): (Kind, Device),
    ) -> Result<Self> {
        let names = &source.names;
        let unread = |count: usize, frames: Option<usize>, channels: usize, window: &[Range<usize>]| {
            let inner = frames.into_iter().chain([channels]).chain(window.iter().map(Range::len));
            let shape: Vec<i64> = std::iter::once(count).chain(inner).map(|extent| extent as i64).collect();
            match config.cache == Cache::All {
                true => Tensor::f_ones(&shape[..], (kind, device)),
                false => Tensor::f_ones(vec![1; shape.len()], (kind, device))?.f_expand(&shape[..], false),
            }
        };
        let [inputs, targets] = [(&*source.data, &names.inputs), (&**source.targets(), &names.targets)]
            .map(|(data, names)| channels(data, names));
        let (inputs, targets, forcings) = (inputs?, targets?, channels(&*source.data, &names.forcings)?);
        let Parts { train, validation, .. } = &source.parts;
        let (train, validation, rollouts) = match source.has_steps() {
            false => {
                let pairs = |part: &Part| -> Result<InMemory> {
                    let of = |channels, window| unread(part.samples.len(), None, channels, window);
                    Ok(InMemory::pairs(of(inputs, window)?, of(targets, target_window)?)?)
                };
                (pairs(train)?, pairs(validation)?, None)
            }
            true => {
                let frames = |part: &Part| -> Result<(Tensor, Vec<f64>)> {
                    let times = part.data.times().unwrap_or_default();
                    let stored = targets + forcings;
                    Ok((unread(part.samples.len(), Some(times.len()), stored, window)?, times.to_vec()))
                };
                in_rollouts(config, &frames(train)?, &frames(validation)?)?
            }
        };
        let scales = |channels: usize| Normalizer::of_scales(&vec![1.0; channels]);
        let some = |channels: usize| (channels > 0).then(|| scales(channels)).transpose();
        let is_change = source.has_steps() && config.predict == Predict::Change;
        let scales = Scales {
            input: scales(inputs)?,
            target: scales(targets)?,
            change: is_change.then(|| scales(inputs)).transpose()?,
            forcing: some(forcings)?,
        };
        let fixed = some(channels(&*source.data, &names.statics)?)?;
        Ok(Self::of(train.into(), validation.into(), rollouts.map(Into::into), (scales, fixed), None))
    }

    fn of(
        train: Box<dyn Samples>,
        validation: Box<dyn Samples>,
        rollouts: Option<Box<dyn Samples>>,
        (scales, statics): (Scales, Option<Normalizer>),
        reader: Option<Arc<Reader>>,
    ) -> Self {
        let Scales { input, target, change, forcing } = scales;
        Self { train, validation, rollouts, input, target, change, forcing, statics, reader }
    }
}

/// Values of a part: of trajectories all frames, and of samples without time inputs and targets, with one frame each.
type Values = (Tensor, Option<Tensor>);

/// Reads the values of training and of validation; an error of one rank is an error on all. All ranks call.
fn read_all([train, validation]: &[PartWindows; 2], place: &Place<'_>, world: &Group) -> Result<[Values; 2]> {
    let kind = place.options.0;
    let size =
        (train.bytes(kind).saturating_add(validation.bytes(kind)), train.rounds() + validation.rounds());
    let mut reading = Reading::new((world, place.signals), "reading the samples into memory", size);
    Ok([train.read(place.options, &mut reading)?, validation.read(place.options, &mut reading)?])
}

/// Makes samples of the values of training and of validation.
fn in_memory(source: &Source, config: &DataConfig, values: [Values; 2]) -> Result<Three<InMemory>> {
    let pairs = |inputs: Tensor, targets: Tensor| -> Result<InMemory> {
        Ok(InMemory::pairs(inputs.f_select(1, 0)?, targets.f_select(1, 0)?)?)
    };
    match values {
        [(inputs, Some(targets)), (of_validation, Some(validated))] => {
            Ok((pairs(inputs, targets)?, pairs(of_validation, validated)?, None))
        }
        [(train, _), (validation, _)] => {
            let times = |part: &Part| part.data.times().unwrap_or_default().to_vec();
            let Parts { train: of_train, validation: of_validation, .. } = &source.parts;
            in_rollouts(config, &(train, times(of_train)), &(validation, times(of_validation)))
        }
    }
}

/// Cuts trajectories, `[trajectory, frame, channel, spatial…]` with the times of their frames, into samples.
fn in_rollouts(
    config: &DataConfig,
    train: &(Tensor, Vec<f64>),
    validation: &(Tensor, Vec<f64>),
) -> Result<Three<InMemory>> {
    let rollouts = |(values, times): &(Tensor, Vec<f64>), steps: usize, stride: usize| -> Result<InMemory> {
        Ok(InMemory::rollouts(values, steps, stride)?.with_times(times)?)
    };
    // Frames of the history come before the steps.
    let (steps, past) = (config.validation_steps, past(config));
    let long = (steps > 1).then(|| rollouts(validation, past + steps, steps)).transpose()?;
    let train_steps = config.train_steps.after(past);
    let train = rollouts(train, train_steps.most(), 1)?.with_steps(train_steps)?;
    Ok((train, rollouts(validation, past + 1, 1)?, long))
}

/// Number of input frames before the newest.
fn past(config: &DataConfig) -> usize {
    config.history.saturating_sub(1)
}

/// Starts the threads that read samples.
fn streamed(
    source: &Source,
    config: &DataConfig,
    place: &Place<'_>,
    (train, validation): (&Part, &Part),
) -> Result<(Three<Streamed>, Arc<Reader>)> {
    let keep = config.cache == Cache::Window;
    let options = ReaderOptions { host_memory: config.host_memory, workers: config.workers, keep };
    let reader = Arc::new(Reader::new(options)?);
    let (inputs, targets) = match source.has_steps() {
        true => (source.names.stored(), source.names.stored()),
        false => (source.inputs.clone(), source.targets.clone()),
    };
    let of = |part: &Part, steps: &TrainSteps, stride: usize| {
        let options = StreamOptions {
            window: place.window.to_vec(),
            halo: Vec::new(),
            inputs: inputs.clone(),
            targets: targets.clone(),
            targets_from: part
                .target
                .clone()
                .map(|data| TargetWindow { data, points: place.target_window.to_vec() }),
            steps: steps.clone(),
            stride,
            options: place.options,
            at_once: place.at_once,
        };
        Streamed::new(&reader, (part.data.clone(), part.samples.clone()), &options)
    };
    let (steps, past) = (config.validation_steps, past(config));
    let train = of(train, &config.train_steps.after(past), 1)?;
    let rollouts = (steps > 1).then(|| of(validation, &(past + steps).into(), steps)).transpose()?;
    let validation = of(validation, &(past + 1).into(), 1)?;
    let parts = [&train, &validation].into_iter().chain(&rollouts);
    let needed = parts.map(|part| part.needed(place.own)).max().unwrap_or_default();
    if needed > config.host_memory {
        let needed = needed.rounded_up();
        bail!(Exit::Usage.because(format!(
            "data.host_memory is {}, but reading {} samples, the most of this rank at a time, takes {needed}; --set \
             data.host_memory={needed}, or fewer samples (--set train.batch_size=…), or more ranks that share them",
            config.host_memory, place.own
        )));
    }
    Ok(((train, validation, rollouts), reader))
}
