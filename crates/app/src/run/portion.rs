//! Statistics over a portion of the training samples.

use anyhow::{Result, bail};
use isobar_data::{Statistics, merge_channels};
use serde::{Deserialize, Serialize};

use isobar_command::exit::{Because, Exit};

/// Statistics of each channel over the training samples; over a portion of them an `Option`, `None` of a channel without a value.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Portion<S = Statistics> {
    pub(super) inputs: Vec<S>,
    /// Statistics of outputs that are not inputs: targets of samples without time, or diagnostic variables.
    pub(super) targets: Vec<S>,
    /// Statistics of stored forcings.
    pub(super) forcings: Vec<S>,
    /// Statistics of changes, if the network predicts these.
    pub(super) changes: Vec<S>,
}

/// Names of the channels of a [`Portion`].
pub(super) struct ChannelNames {
    pub(super) inputs: Vec<String>,
    pub(super) targets: Vec<String>,
    pub(super) forcings: Vec<String>,
}

impl Portion {
    /// Returns true for sound numbers of so many inputs, other outputs and forcings, and of changes of all inputs if there are
    /// changes.
    pub(super) fn fits(&self, [inputs, others, forcings]: [usize; 3], changes: bool) -> bool {
        let all = [&self.inputs, &self.targets, &self.forcings, &self.changes];
        let [of_inputs, of_targets, of_forcings, of_changes] = all.map(Vec::len);
        let sound = |own: &Statistics| {
            let finite =
                [own.weight, own.mean, own.std, own.min, own.max].iter().all(|number| number.is_finite());
            finite
                && own.count > 0
                && own.weight > 0.0
                && own.std >= 0.0
                && (own.min..=own.max).contains(&own.mean)
        };
        [of_inputs, of_targets, of_forcings] == [inputs, others, forcings]
            && of_changes == if changes { inputs } else { 0 }
            && all.iter().copied().flatten().all(sound)
    }

    /// Merges the statistics of all portions; a part that no portion has stays empty. Fails for a channel without a value in any.
    pub(super) fn merged(all: &[Portion<Option<Statistics>>], names: &ChannelNames) -> Result<Self> {
        type Parts = Vec<Option<Statistics>>;
        let merged = |of: fn(&Portion<Option<Statistics>>) -> &Parts,
                      names: &[String],
                      what: &str|
         -> Result<_> {
            let merged = merge_channels(&all.iter().map(of).cloned().collect::<Vec<_>>())?;
            if let Some(at) = merged.iter().position(Option::is_none) {
                let name = names.get(at).map_or("?", String::as_str);
                bail!(Exit::Data.because(format!(
                    "the training samples have no {what} of `{name}`: all are missing; leave the variable out, or add samples \
                     that have some"
                )));
            }
            Ok(merged.into_iter().flatten().collect::<Vec<Statistics>>())
        };
        Ok(Self {
            inputs: merged(|portion| &portion.inputs, &names.inputs, "value")?,
            targets: merged(|portion| &portion.targets, &names.targets, "value")?,
            forcings: merged(|portion| &portion.forcings, &names.forcings, "value")?,
            changes: merged(|portion| &portion.changes, &names.inputs, "change from frame to frame")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Portions in which a channel has no value leave it to the others; only if none has any, it is an error.
    #[test]
    fn portions_without_a_value_are_left_out() {
        let some =
            |mean: f64| Some(Statistics { count: 4, weight: 4.0, mean, std: 0.0, min: mean, max: mean });
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let names =
            ChannelNames { inputs: names(&["u", "v"]), targets: names(&["rain"]), forcings: Vec::new() };
        let portion = |inputs: [_; 2], targets, changes: [_; 2]| Portion {
            inputs: inputs.to_vec(),
            targets: vec![targets],
            changes: changes.to_vec(),
            ..Portion::default()
        };
        let first = portion([some(1.0), None], some(5.0), [some(0.5), None]);
        let second = portion([some(3.0), some(2.0)], None, [None, some(0.25)]);
        let merged = Portion::merged(&[first.clone(), second.clone()], &names).unwrap();
        assert_eq!((merged.inputs[0].count, merged.inputs[0].mean), (8, 2.0));
        assert_eq!((Some(merged.inputs[1]), Some(merged.targets[0])), (some(2.0), some(5.0)));
        assert_eq!([Some(merged.changes[0]), Some(merged.changes[1])], [some(0.5), some(0.25)]);
        assert!(merged.forcings.is_empty() && merged.fits([2, 1, 0], true));
        let error = |own| Portion::merged(&[own], &names).unwrap_err().to_string();
        let lacks_value = error(first);
        assert!(lacks_value.contains("no value of `v`: all are missing"), "{lacks_value}");
        let lacks_change = error(portion([some(1.0), some(2.0)], some(5.0), [None, some(0.5)]));
        assert!(lacks_change.contains("no change from frame to frame of `u`"), "{lacks_change}");
    }
}
