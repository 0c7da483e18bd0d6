//! The scales of a run's fields: statistics of the training samples, which ranks read together.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_data::{DataPortion, Dataset, Normalizer, Part, Statistics, choose, digest, part, portions};
use isobar_train::config::{DataConfig, Predict};
use isobar_train::{SampleFingerprint, Signals};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::all_ok;
use super::kept;
use super::place::Place;
use super::portion::{ChannelNames, Portion};
use super::reading::Reading;
use super::roles::{self, as_str};
use super::source::Source;
use isobar_command::exit::{Because, Exit};

/// Scales of the fields of a network.
pub(super) struct Scales {
    pub(super) input: Normalizer,
    pub(super) target: Normalizer,
    /// Scales of changes from frame to frame, if the network predicts changes.
    pub(super) change: Option<Normalizer>,
    /// Of the stored forcings, if there are some.
    pub(super) forcing: Option<Normalizer>,
}

/// Statistics of the data as a rank sees them, and, on rank 0, what the folder of the run keeps of them.
#[derive(Serialize, Deserialize)]
struct Seen {
    fingerprint: SampleFingerprint,
    kept: Option<Portion>,
}

/// Computes the scales, and checks that all ranks see the same data: each rank reads some portions of the training samples, and
/// all ranks merge them in the same order. If the folder `place.keep` has the statistics of these data, nothing is read; otherwise rank 0
/// keeps them there. All ranks call.
pub(super) fn scales_alike(
    source: &Source,
    train: &Part,
    (config, description): (&DataConfig, &str),
    (world, place): (&Group, &Place<'_>),
) -> Result<Scales> {
    let is_change = source.has_steps() && config.predict == Predict::Change;
    let keep = place.keep.filter(|_| world.rank() == 0);
    let seen = (|| -> Result<(Seen, Option<Value>)> {
        let digest = digest_of(source)?;
        let of = match keep {
            Some(_) => kept::description(source, train, config, (digest, is_change))?,
            None => None,
        };
        let kept = keep.zip(of.as_ref()).and_then(|(folder, of)| kept::read(folder, of));
        Ok((Seen { fingerprint: SampleFingerprint::of_digest(description.to_owned(), digest), kept }, of))
    })();
    let seen = seen.and_then(|(seen, of)| Ok((serde_json::to_vec(&seen)?, of)));
    let (of, all) = all_ok(world, seen)?;
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<Vec<Seen>, _>>()?;
    check_same(&all.iter().map(|seen| seen.fingerprint.clone()).collect::<Vec<_>>())?;
    let statistics = match all.into_iter().find_map(|seen| seen.kept) {
        Some(kept) => {
            if world.rank() == 0 {
                tracing::info!("statistics of the training samples are those of the last start");
            }
            kept
        }
        None => {
            let own = share(source, is_change, (world, place.signals))?;
            let own = serde_json::to_vec(&own).map(|own| (own, ())).map_err(anyhow::Error::from);
            let ((), all) = all_ok(world, own)?;
            let all = all
                .iter()
                .map(|bytes| serde_json::from_slice(bytes))
                .collect::<Result<Vec<Vec<Portion<Option<Statistics>>>>, _>>()?;
            let merged = Portion::merged(&all.concat(), &channel_names(source, train)?)?;
            if let Some((folder, of)) = keep.zip(of) {
                kept::write(folder, of, &merged);
            }
            merged
        }
    };
    let scalars = if source.has_steps() { &statistics.forcings } else { &statistics.inputs };
    check_scalars(source, train, &config.scalars, scalars)?;
    check_constants(&statistics, &channel_names(source, train)?, train)?;
    let Portion { inputs, targets, forcings, changes } = statistics;
    let input = Normalizer::of_channels(&inputs)?;
    let target = match (source.has_steps(), source.has_others()) {
        (true, true) => Normalizer::of_channels(&[inputs, targets].concat())?,
        (false, true) => Normalizer::of_channels(&targets)?,
        (_, false) => input.clone(),
    };
    let has_forcings = !source.names.forcings.is_empty();
    let forcing = has_forcings.then(|| Normalizer::of_channels(&forcings)).transpose()?;
    let change = is_change.then(|| change_scales(&changes, &input)).transpose()?;
    source.set_scales([&input, &target], forcing.as_ref())?;
    Ok(Scales { input, target, change, forcing })
}

/// Rejects variables that are constant over the training samples: they cannot be normalised.
fn check_constants(statistics: &Portion, names: &ChannelNames, train: &Part) -> Result<()> {
    let roles = [
        (&statistics.inputs, &names.inputs),
        (&statistics.targets, &names.targets),
        (&statistics.forcings, &names.forcings),
    ];
    let mut all = roles.into_iter().flat_map(|(statistics, names)| names.iter().zip(statistics));
    match all.find(|(_, own)| own.min == own.max) {
        None => Ok(()),
        Some((name, own)) => bail!(Exit::Usage.because(format!(
            "`{name}` is {} at all points of the training samples of {} and cannot be normalised; leave it out, or name it in data.scalars \
             or data.statics if it differs in other samples",
            own.min,
            train.data.path().display()
        ))),
    }
}

/// Rejects scalars, the last variables of `statistics`, that are the same in all training samples.
fn check_scalars(source: &Source, train: &Part, names: &[String], statistics: &[Statistics]) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let channels = source.chosen(names)?.into_iter().flat_map(|variable| variable.channels);
    let pairs = channels.collect::<Vec<_>>().into_iter().rev().zip(statistics.iter().rev());
    match pairs.into_iter().find(|(_, own)| own.min == own.max) {
        None => Ok(()),
        Some((name, own)) => bail!(Exit::Usage.because(format!(
            "data.scalars names {name:?}, which is {} in all training samples of {}: it tells a network nothing; leave it out",
            own.min,
            train.data.path().display()
        ))),
    }
}

/// The variables that statistics are taken of, by the data set that they are in.
fn variables<'a>(source: &'a Source, train: &'a Part) -> Vec<(&'a dyn Dataset, Vec<&'a str>)> {
    let (inputs, others) = (as_str(&source.inputs), as_str(source.others()));
    let forcings = as_str(&source.names.forcings);
    match &train.target {
        None => vec![(&*train.data, [inputs, others, forcings].concat())],
        Some(target) => vec![(&*train.data, [inputs, forcings].concat()), (&**target, others)],
    }
}

/// Returns a digest of the training samples as stored, since the numbers that replace missing values are not known yet.
fn digest_of(source: &Source) -> Result<u64> {
    let train = source.parts.stored();
    let of = |(data, names): (&dyn Dataset, Vec<&str>)| digest(data, &names, train.samples.clone());
    let all = variables(source, train).into_iter().map(of).collect::<Result<Vec<u64>, _>>()?;
    Ok(match all[..] {
        [only] => only,
        _ => {
            let mut hasher = DefaultHasher::new();
            all.hash(&mut hasher);
            hasher.finish()
        }
    })
}

/// Cuts the training samples into portions: those of the data set with the larger samples.
fn portions_of(source: &Source, train: &Part) -> Result<Vec<DataPortion>> {
    let of = |(data, names): (&dyn Dataset, Vec<&str>)| portions(data, &names, train.samples.clone());
    let all = variables(source, train).into_iter().map(of).collect::<Result<Vec<_>, _>>()?;
    Ok(all.into_iter().max_by_key(Vec::len).unwrap_or_default())
}

/// Names of the channels that statistics are taken of.
fn channel_names(source: &Source, train: &Part) -> Result<ChannelNames> {
    let names =
        |data, variables: &[String]| Ok::<_, anyhow::Error>(roles::channel_names(data, variables)?.concat());
    Ok(ChannelNames {
        inputs: names(&*train.data, &source.inputs)?,
        targets: names(&**train.targets(), source.others())?,
        forcings: names(&*train.data, &source.names.forcings)?,
    })
}

/// Fails on all ranks if two of them see other data.
pub(super) fn check_same(seen: &[SampleFingerprint]) -> Result<()> {
    match SampleFingerprint::difference(seen) {
        None => Ok(()),
        Some((rank, other, difference)) => bail!(Exit::Mismatch.because(format!(
            "ranks {rank} and {other} read different data: {difference}; give all ranks the same file (--set data.path=FILE)"
        ))),
    }
}

/// Reads this rank's portions of the training samples, as stored: numbers that replace missing values do not count. An error of
/// one rank is an error on all. All ranks call.
fn share(
    source: &Source,
    is_change: bool,
    (world, signals): (&Group, &Signals),
) -> Result<Vec<Portion<Option<Statistics>>>> {
    let train = source.parts.stored();
    let all = portions_of(source, train)?;
    let numbers: Vec<usize> = (0..all.len()).collect();
    let own: Vec<&DataPortion> =
        part(&numbers, world.rank(), world.size()).iter().filter_map(|&number| all.get(number)).collect();
    // The first ranks may have a portion more.
    let count = all.len().div_ceil(world.size());
    let what = "computing statistics of the training samples";
    let mut reading = Reading::new((world, signals), what, (bytes_of(source, train)?, count));
    let mut read = Vec::with_capacity(own.len());
    for round in 0..count {
        let own = own.get(round).map(|portion| statistics_of(source, is_change, portion));
        read.extend(reading.end(own.transpose())?);
    }
    Ok(read)
}

/// Bytes of the values that statistics are taken of, in single precision.
fn bytes_of(source: &Source, train: &Part) -> Result<u64> {
    let of = |(data, names): (&dyn Dataset, Vec<&str>)| -> Result<u64> {
        let channels: usize = choose(data, &names)?.iter().map(|variable| variable.channels.len()).sum();
        let frames = data.times().map_or(1, <[f64]>::len);
        let outer = [size_of::<f32>(), train.samples.len(), frames, channels].into_iter();
        let extents = outer.chain(data.dims().iter().map(|dim| dim.coordinates.len()));
        Ok(extents.fold(1, |bytes, extent| bytes.saturating_mul(extent as u64)))
    };
    variables(source, train).into_iter().map(of).try_fold(0, |all: u64, own| Ok(all.saturating_add(own?)))
}

/// Computes the statistics of a portion of the training samples.
fn statistics_of(
    source: &Source,
    is_change: bool,
    portion: &DataPortion,
) -> Result<Portion<Option<Statistics>>> {
    let (inputs, forcings) = (as_str(&source.inputs), as_str(&source.names.forcings));
    let train = source.parts.stored();
    let (data, targets) = (&train.data, train.targets());
    let of = |data: &Arc<dyn Dataset>, names: &[&str]| -> Result<Vec<Option<Statistics>>> {
        Ok(if names.is_empty() { Vec::new() } else { portion.statistics(data, names)? })
    };
    Ok(Portion {
        inputs: of(data, &inputs)?,
        targets: of(targets, &as_str(source.others()))?,
        forcings: of(data, &forcings)?,
        changes: if is_change { portion.change_statistics(data, &inputs)? } else { Vec::new() },
    })
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
        let changes =
            changes.map(|(mean, std)| Statistics { count: 8, weight: 8.0, mean, std, min: 0.0, max: 1.0 });
        // A quarter of the deviation, a twentieth, and none.
        assert_eq!(change_scales(&changes, &values).unwrap().std(), [2.0, 20.0, 5.0]);
        let one = Normalizer::of_scales(&[2.0]).unwrap();
        assert_eq!(change_scales(&changes[..1], &one).unwrap().std(), [2.0], "as its values");
    }
}
