//! Checks of the samples that a program's `data` returns, and their normalization.

use std::ops::Range;

use isobar_collectives::Group;
use isobar_data::{InMemory, Normalizer, Statistics};
use tch::Tensor;

use super::{Windows, data_error};
use crate::agree::agree;
use crate::error::{Context, Error};
use crate::samples::SampleFingerprint;
use crate::task::BoxError;

/// A part of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Training,
    Validation,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Validation => "validation",
        }
    }

    /// Checks what `data` returned on this rank: training samples, shapes of this rank's windows, and finite values. Does not
    /// communicate.
    pub(super) fn check(self, data: &InMemory, windows: &Windows) -> crate::Result<()> {
        if self == Self::Training && data.is_empty() {
            return Err(Error::invalid(
                "the number of training samples that `data` returned",
                0,
                "1 or more",
            ));
        }
        for (what, fields, window) in
            [("inputs", data.inputs(), &windows.inputs), ("targets", data.targets(), &windows.targets)]
        {
            let what = format!("{} {what}", self.name());
            shape(&what, &fields.size(), window)?;
            finite(&what, fields)?;
        }
        Ok(())
    }
}

/// Checks `[sample, channel, spatial…]` against this rank's window.
fn shape(what: &str, found: &[i64], window: &[Range<usize>]) -> crate::Result<()> {
    let extents: Vec<i64> = window.iter().map(|range| range.len() as i64).collect();
    if found.len() == extents.len() + 2 && found[1] > 0 && found[2..] == extents[..] {
        return Ok(());
    }
    let spatial: Vec<String> = extents.iter().map(ToString::to_string).collect();
    let expected = format!(
        "[sample, channel, {}] with at least one channel; return the window {window:?} of this rank (`Windows`)",
        spatial.join(", ")
    );
    Err(Error::invalid(format!("the shape of the {what}"), format!("{found:?}"), expected))
}

fn finite(what: &str, fields: &Tensor) -> crate::Result<()> {
    for channel in 0..fields.size()[1] {
        let named = || format!("channel {channel} of the {what}");
        let values = fields.f_select(1, channel).and_then(|values| values.f_isfinite()?.f_all());
        if values.and_then(|all| all.f_int64_value(&[])).context(named)? == 0 {
            return Err(Error::invalid(named(), "not finite everywhere", "finite values"));
        }
    }
    Ok(())
}

/// Checks that all ranks have the same samples, and those with the same window the same values. All ranks call.
pub(super) fn same_samples(
    train: &InMemory,
    validation: &InMemory,
    windows: &Windows,
    world: &Group,
) -> Result<(), BoxError> {
    let channels = |fields: &Tensor| fields.size().get(1).copied().unwrap_or(0);
    let described = |data: &InMemory| {
        let [from, to] = [data.inputs(), data.targets()].map(channels);
        format!("{} samples of {} steps, {from} to {to} channels", data.len(), data.steps())
    };
    let description = format!("{}, and {} for validation", described(train), described(validation));
    let window = [&windows.inputs[..], &windows.targets].concat();
    let own = agree(world, SampleFingerprint::new(description, &window, &[train, validation]))?;
    let all = world.all_gather_bytes(&serde_json::to_vec(&own)?)?;
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
    let all = all.collect::<Result<Vec<SampleFingerprint>, _>>()?;
    match SampleFingerprint::difference(&all) {
        None => Ok(()),
        Some((rank, other, difference)) => Err(Error::SamplesDiffer { rank, other, difference }.into()),
    }
}

/// Mean and deviation of each channel of the training inputs or targets over the windows of all ranks. All ranks call.
pub(super) fn normalizer(what: &str, window: &Tensor, world: &Group) -> Result<Normalizer, BoxError> {
    let channels = window.size().get(1).copied().unwrap_or(0);
    let own = (0..channels).map(|channel| {
        let values = window.f_select(1, channel).context(|| "a channel of the fields".to_owned())?;
        // A rank may have no points.
        if values.numel() == 0 {
            return Ok(None);
        }
        Ok(Some(Statistics::of(&values).map_err(data_error)?))
    });
    let own = agree(world, own.collect::<crate::Result<Vec<Option<Statistics>>>>())?;
    let all = world.all_gather_bytes(&serde_json::to_vec(&own)?)?;
    let all = all.iter().map(|bytes| serde_json::from_slice::<Vec<Option<Statistics>>>(bytes));
    let all = all.collect::<Result<Vec<_>, _>>()?;
    let merged = (0..own.len()).map(|channel| {
        let parts: Vec<Statistics> = all.iter().filter_map(|rank| *rank.get(channel)?).collect();
        Statistics::merged(&parts)
    });
    let merged = merged.collect::<isobar_data::Result<Vec<_>>>()?;
    for (channel, Statistics { mean, std, .. }) in merged.iter().enumerate() {
        if !std.is_finite() || *std <= 0.0 {
            let what = format!("the standard deviation of channel {channel} of the training {what}");
            let expected = format!(
                "a finite number above 0, as the channel is normalized (its mean is {mean}); leave out the channel, or call \
                 `Trainer::normalize(false)`"
            );
            return Err(Error::invalid(what, std, expected).into());
        }
    }
    Ok(Normalizer::of_channels(&merged)?)
}
