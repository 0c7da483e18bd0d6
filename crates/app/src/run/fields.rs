//! The samples of a run, and what they are scaled by.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_data::{
    Cache, Dataset, InMemory, Normalizer, Part, Parts, Reader, ReaderOptions, Samples, StreamOptions,
    Streamed, TargetWindow, TrainSteps, Window,
};
use isobar_train::SampleFingerprint;
use isobar_train::config::{DataConfig, Predict};
use tch::{Device, Kind, Tensor};

use super::all_ok;
use super::roles::{as_str, channels};
use super::scales::{Scales, check_same, scales_alike};
use super::source::Source;
use super::statics::Statics;
use isobar_command::exit::{Because, Exit};

/// Window that a rank reads of each field, and the number of samples that it reads at a time.
pub(crate) struct Place<'a> {
    /// A range for each spatial dim of the inputs.
    pub(crate) window: &'a [Range<usize>],
    /// A range for each spatial dim of the targets.
    pub(crate) target_window: &'a [Range<usize>],
    /// Dtype and device of what the network sees.
    pub(crate) options: (Kind, Device),
    /// Most samples that this rank reads at a time.
    pub(crate) own: usize,
    /// Most samples that a task asks for at a time in validation: the same on all ranks.
    pub(crate) at_once: usize,
    /// The folder that keeps the statistics of the training samples for the next start.
    pub(crate) keep: Option<&'a Path>,
}

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
        let description = format!("{} + {} samples of {extents}", counts[0], counts[1]);
        let scales = scales_alike(source, train, (config, &description), (world, place.keep))?;
        let (statics, _) = all_ok(world, Statics::normalizer(source).map(|statics| (Vec::new(), statics)))?;
        let scales = (scales, statics);
        if config.cache != Cache::All {
            let streamed = streamed(source, config, place, (train, validation));
            let (((train, validation, rollouts), reader), _) =
                all_ok(world, streamed.map(|streamed| (Vec::new(), streamed)))?;
            let rollouts = rollouts.map(|rollouts| Box::new(rollouts) as Box<dyn Samples>);
            let (train, validation) = (Box::new(train), Box::new(validation));
            return Ok(Self::of(train, validation, rollouts, scales, Some(reader)));
        }
        let read = in_memory(source, config, place, (train, validation)).and_then(|read| {
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

/// Reads all samples.
fn in_memory(
    source: &Source,
    config: &DataConfig,
    place: &Place<'_>,
    (train, validation): (&Part, &Part),
) -> Result<Three<InMemory>> {
    let (inputs, targets, stored) = (as_str(&source.inputs), as_str(&source.targets), source.names.stored());
    let (kind, device) = place.options;
    let all = |part: &Part| part.samples.clone().collect::<Vec<usize>>();
    if !source.has_steps() {
        let load = |part: &Part| -> Result<InMemory> {
            let read = |data: &dyn Dataset, window: &[Range<usize>], names: &[&str]| -> Result<Tensor> {
                Ok(data.read(&Window::still(window), &all(part), names)?.f_select(1, 0)?)
            };
            let inputs = read(&*part.data, place.window, &inputs)?;
            let targets = read(&**part.targets(), place.target_window, &targets)?;
            Ok(InMemory::pairs(inputs, targets)?.to(device, kind)?)
        };
        return Ok((load(train)?, load(validation)?, None));
    }
    let load = |part: &Part| -> Result<(Tensor, Vec<f64>)> {
        let times = part.data.times().unwrap_or_default();
        let window = Window { frames: 0..times.len(), points: place.window.to_vec() };
        let values = part.data.read(&window, &all(part), &as_str(&stored))?;
        Ok((values.f_to_device(device)?.f_to_kind(kind)?, times.to_vec()))
    };
    in_rollouts(config, &load(train)?, &load(validation)?)
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
