//! `data.train_steps`: steps of a training sample, the same in all epochs or more in later ones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Steps of a training sample: a number, or a list of epochs from which on a sample has other steps.
///
/// Samples start where the longest sample of the list fits into its trajectory, so that all epochs have the same samples.
///
/// ```
/// use isobar_data::{StepsFrom, TrainSteps};
///
/// let steps = TrainSteps::Schedule(vec![StepsFrom { epoch: 0, steps: 1 }, StepsFrom { epoch: 5, steps: 4 }]);
/// assert_eq!([0, 4, 5, 90].map(|epoch| steps.at(epoch)), [1, 1, 4, 4]);
/// assert_eq!((steps.most(), TrainSteps::from(2).most()), (4, 2));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a number of steps, or a list such as [{ epoch = 0, steps = 1 }, { epoch = 5, steps = 4 }]"
)]
pub enum TrainSteps {
    /// In all epochs.
    Constant(#[schemars(range(min = 1))] usize),
    /// From each of these epochs on, which ascend from 0.
    Schedule(Vec<StepsFrom>),
}

/// Steps of a training sample from an epoch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StepsFrom {
    /// The first epoch with these steps, counted from 0.
    pub epoch: u64,
    /// Steps of a training sample.
    #[schemars(range(min = 1))]
    pub steps: usize,
}

impl TrainSteps {
    /// Returns the steps of a sample in an epoch, counted from 0.
    pub fn at(&self, epoch: u64) -> usize {
        match self {
            Self::Constant(steps) => *steps,
            Self::Schedule(list) => {
                let entry = list.iter().rev().find(|entry| entry.epoch <= epoch).or(list.first());
                entry.map_or(1, |entry| entry.steps)
            }
        }
    }

    /// Returns the most steps of a sample in any epoch.
    pub fn most(&self) -> usize {
        match self {
            Self::Constant(steps) => *steps,
            Self::Schedule(list) => list.iter().map(|entry| entry.steps).max().unwrap_or(1),
        }
    }

    /// Returns the fewest steps of a sample in any epoch.
    pub fn least(&self) -> usize {
        match self {
            Self::Constant(steps) => *steps,
            Self::Schedule(list) => list.iter().map(|entry| entry.steps).min().unwrap_or(1),
        }
    }

    /// Returns the same schedule with `more` steps everywhere, such as the frames of a history before them.
    #[must_use]
    pub fn after(&self, more: usize) -> Self {
        let longer = |steps: usize| steps.saturating_add(more);
        match self {
            Self::Constant(steps) => Self::Constant(longer(*steps)),
            Self::Schedule(list) => Self::Schedule(
                list.iter().map(|from| StepsFrom { steps: longer(from.steps), ..*from }).collect(),
            ),
        }
    }

    /// Checks that a list begins with epoch 0, ascends, and has at least one step everywhere.
    ///
    /// # Errors
    /// [`Error::Config`] otherwise.
    pub fn check(&self) -> Result<()> {
        let Self::Schedule(list) = self else { return Ok(()) };
        let mend = "expected epochs that ascend from 0 and steps of at least 1; --set \
                    'data.train_steps=[{ epoch = 0, steps = 1 }, { epoch = 5, steps = 4 }]'";
        let wrong = |what: String| Err(Error::Config(format!("data.train_steps {what}; {mend}")));
        match list.first() {
            None => return wrong("is an empty list".to_owned()),
            Some(first) if first.epoch > 0 => return wrong(format!("begins with epoch {}", first.epoch)),
            Some(_) => {}
        }
        let mut pairs = list.iter().zip(list.iter().skip(1));
        if let Some((_, later)) = pairs.find(|(first, later)| later.epoch <= first.epoch) {
            return wrong(format!("has epoch {} after a later one, or twice", later.epoch));
        }
        match list.iter().find(|entry| entry.steps == 0) {
            Some(entry) => wrong(format!("has 0 steps from epoch {} on", entry.epoch)),
            None => Ok(()),
        }
    }
}

impl From<usize> for TrainSteps {
    fn from(steps: usize) -> Self {
        Self::Constant(steps)
    }
}

impl Default for TrainSteps {
    fn default() -> Self {
        Self::Constant(1)
    }
}

/// Rejects steps that samples do not have.
pub(crate) fn check_steps(steps: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&steps) {
        return Ok(());
    }
    Err(Error::Invalid(format!("{steps} steps of a sample are asked for: expected 1 to {most}")))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("[]", "is an empty list")]
    #[case(r#"[{"epoch": 1, "steps": 2}]"#, "begins with epoch 1")]
    #[case(
        r#"[{"epoch": 0, "steps": 2}, {"epoch": 0, "steps": 3}]"#,
        "has epoch 0 after a later one, or twice"
    )]
    #[case(r#"[{"epoch": 0, "steps": 2}, {"epoch": 4, "steps": 0}]"#, "has 0 steps from epoch 4 on")]
    fn lists_that_make_no_sense_are_refused(#[case] list: &str, #[case] words: &str) {
        let steps: TrainSteps = serde_json::from_str(list).unwrap();
        let error = steps.check().unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("--set"), "{error}");
        assert!(steps.at(9) <= steps.most().max(1));
    }

    #[test]
    fn a_number_is_a_number_in_toml_too() {
        assert_eq!(serde_json::from_str::<TrainSteps>("3").unwrap(), TrainSteps::Constant(3));
        assert_eq!(serde_json::to_string(&TrainSteps::Constant(3)).unwrap(), "3");
        let error = serde_json::from_str::<TrainSteps>("\"three\"").unwrap_err().to_string();
        assert!(error.contains("expected a number of steps, or a list"), "{error}");
    }
}
