//! Regression: the network's outputs against the targets.

use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Objective, ObjectiveArray, Setup, Training};
use crate::task::BoxError;

/// Training by `train.loss` of the network's outputs after each step of a sample against the targets: the mean over steps, weighted
/// by `train.weights.lead`. A network of several steps gets its own outputs as inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RegressionConfig {}

impl Registered for RegressionConfig {
    const NAME: &'static str = "regression";
    const SUMMARY: &'static str = "Compares the network's outputs with the targets by `train.loss`.";
}

impl Objective for RegressionConfig {
    fn loss<A: ObjectiveArray>(&self, training: &Training<'_, A>) -> Result<A, BoxError> {
        training.compare(&training.roll_out()?)
    }

    fn can_be_first_stage(&self) -> bool {
        true
    }

    fn check(&self, setup: &Setup) -> Result<(), BoxError> {
        match &setup.denoiser {
            None => Ok(()),
            Some(_) => Err(format!(
                "model.type = {:?} is a denoiser, which task.type = \"regression\" cannot train; --set task.type=diffusion",
                setup.model
            )
            .into()),
        }
    }
}

crate::register_task!(RegressionConfig);
