//! Statistics over a portion of the training samples.

use anyhow::Result;
use isobar_data::{Statistics, merge_channels};
use serde::{Deserialize, Serialize};

/// Statistics of each channel over a portion of the training samples.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Portion {
    pub(super) inputs: Vec<Statistics>,
    /// Of outputs that are no inputs: targets of samples without time, or diagnostic variables.
    pub(super) targets: Vec<Statistics>,
    /// Of stored forcings.
    pub(super) forcings: Vec<Statistics>,
    /// If the network predicts changes.
    pub(super) changes: Vec<Statistics>,
}

impl Portion {
    /// Returns true for sound numbers of so many inputs, other outputs and forcings, and of changes of all inputs if there are
    /// changes.
    pub(super) fn fits(&self, [inputs, others, forcings]: [usize; 3], changes: bool) -> bool {
        let all = [&self.inputs, &self.targets, &self.forcings, &self.changes];
        let [of_inputs, of_targets, of_forcings, of_changes] = all.map(Vec::len);
        let sound = |own: &Statistics| {
            let finite = [own.mean, own.std, own.min, own.max].iter().all(|number| number.is_finite());
            finite && own.count > 0 && own.std >= 0.0 && (own.min..=own.max).contains(&own.mean)
        };
        [of_inputs, of_targets, of_forcings] == [inputs, others, forcings]
            && of_changes == if changes { inputs } else { 0 }
            && all.iter().copied().flatten().all(sound)
    }

    /// Statistics of all portions; a part that no portion has stays empty.
    pub(super) fn merged(all: &[Self]) -> Result<Self> {
        let merged = |of: fn(&Self) -> &Vec<Statistics>| {
            Ok::<_, anyhow::Error>(merge_channels(&all.iter().map(of).cloned().collect::<Vec<_>>())?)
        };
        Ok(Self {
            inputs: merged(|portion| &portion.inputs)?,
            targets: merged(|portion| &portion.targets)?,
            forcings: merged(|portion| &portion.forcings)?,
            changes: merged(|portion| &portion.changes)?,
        })
    }
}
