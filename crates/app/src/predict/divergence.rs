//! Divergence of predictions: the samples, steps and channels with values that are not finite.

use std::collections::BTreeMap;

use isobar_train::Variable;
use serde::{Deserialize, Serialize};
use tch::{Kind, TchError, Tensor};

/// Channel of a sample with values that are not finite after a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct NotFinite {
    /// The sample's number in the data.
    pub(super) sample: usize,
    /// Number of the step, from 1.
    pub(super) step: usize,
    /// Index among the channels of the outputs.
    pub(super) channel: usize,
}

/// Samples that diverge, each with its first step and channel that are not finite. They are the same on all ranks.
#[derive(Debug, Default)]
pub(super) struct Divergence(BTreeMap<usize, (usize, usize)>);

/// Number of samples that a message names at most.
const NAMED: usize = 3;

impl Divergence {
    /// Adds the values that ranks found; returns true if they are the first.
    pub(super) fn add(&mut self, found: &[NotFinite]) -> bool {
        let is_first = self.0.is_empty() && !found.is_empty();
        for &NotFinite { sample, step, channel } in found {
            let own = self.0.entry(sample).or_insert((step, channel));
            *own = (*own).min((step, channel));
        }
        is_first
    }

    /// Returns the first step after which a sample is not finite; `None` if all samples are finite.
    pub(super) fn first_step(&self) -> Option<usize> {
        self.0.values().map(|(step, _)| *step).min()
    }

    /// Names the samples, of `samples` in all, that are not finite, with step and variable; `None` if all are finite.
    pub(super) fn text(&self, samples: usize, has_steps: bool, variables: &[Variable]) -> Option<String> {
        let first = self.first_step()?;
        let place = |(sample, &(step, channel)): (&usize, &(usize, usize))| {
            let name = variables.get(channel).map_or("", |variable| &variable.name);
            match has_steps {
                true => format!("`{name}` of trajectory {sample} from step {step} on"),
                false => format!("`{name}` of sample {sample}"),
            }
        };
        let mut text = format!(
            "the prediction is not finite: {}",
            self.0.iter().take(NAMED).map(place).collect::<Vec<_>>().join(", ")
        );
        if let Some(others @ 1..) = self.0.len().checked_sub(NAMED) {
            text += &format!(", and {others} more of {samples} samples");
        }
        Some(match has_steps && first > 1 {
            true => format!("{text}; predict fewer steps (--steps={}), or train further", first - 1),
            false => format!("{text}; train further"),
        })
    }
}

/// Returns the indices `[sample, channel]` with values that are not finite in float32, the dtype of files. The window of predictions
/// is `[sample, channel, spatial…]`.
pub(super) fn not_finite(window: &Tensor) -> Result<Vec<[usize; 2]>, TchError> {
    let finite = stored_finite(window)?;
    if finite.f_all()?.f_int64_value(&[])? != 0 {
        return Ok(Vec::new());
    }
    let of_channel = finite.f_flatten(2, -1)?.f_all_dim(-1, false)?;
    let places = Vec::<i64>::try_from(of_channel.f_logical_not()?.f_nonzero()?.f_flatten(0, -1)?)?;
    Ok(places.as_chunks::<2>().0.iter().map(|place| place.map(|index| index as usize)).collect())
}

/// Replaces values that are not finite in float32 by NaN.
pub(super) fn with_nan(fields: &Tensor) -> Result<Tensor, TchError> {
    fields.f_where_self(&stored_finite(fields)?, &fields.f_full_like(f64::NAN)?)
}

fn stored_finite(fields: &Tensor) -> Result<Tensor, TchError> {
    fields.f_to_kind(Kind::Float)?.f_isfinite()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values beyond float32 are stored as infinities.
    #[test]
    fn values_that_a_file_cannot_hold_become_nan() {
        let values = [1.0, 2.0, 1e300, 4.0, f64::NAN, f64::INFINITY, 7.0, 8.0];
        let window = Tensor::from_slice(&values).view([2, 2, 2]);
        assert_eq!(not_finite(&window).unwrap(), [[0, 1], [1, 0]]);
        assert!(not_finite(&window.narrow(2, 1, 1).narrow(0, 0, 1)).unwrap().is_empty());
        assert!(not_finite(&window.narrow(0, 0, 0)).unwrap().is_empty(), "a rank without samples");
        let stored = Vec::<f64>::try_from(with_nan(&window).unwrap().flatten(0, -1)).unwrap();
        let is_kept = |(value, stored): (&f64, &f64)| value == stored;
        let kept: Vec<bool> = values.iter().zip(&stored).map(is_kept).collect();
        assert_eq!(kept, [true, true, false, true, false, false, true, true]);
        assert_eq!(stored.iter().filter(|value| value.is_nan()).count(), 3);
    }

    #[test]
    fn a_sample_diverges_from_its_first_step_on() {
        let mut divergence = Divergence::default();
        assert!(!divergence.add(&[]) && divergence.first_step().is_none());
        let found = |sample, step, channel| NotFinite { sample, step, channel };
        assert!(divergence.add(&[found(4, 3, 1), found(4, 3, 0)]));
        assert!(!divergence.add(&[found(4, 4, 0), found(1, 4, 2)]));
        assert_eq!(divergence.0, BTreeMap::from([(1, (4, 2)), (4, (3, 0))]));
        assert_eq!(divergence.first_step(), Some(3));
    }
}
