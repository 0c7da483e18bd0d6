//! Mean absolute error.

use isobar_array::{Array, Unary};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Loss, LossArray, Support, Weighting};
use crate::error::Result;

/// Mean over all elements of |p − t|.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mae {}

impl Registered for Mae {
    const NAME: &'static str = "mae";
    const SUMMARY: &'static str = "Mean absolute error.";
}

impl Loss for Mae {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        Ok(prediction.sub(target)?.unary(Unary::Abs)?.mean()?)
    }

    fn support(&self) -> Support {
        Support::WEIGHTS
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        let difference = weights.fill(prediction)?.sub(&weights.fill(target)?)?;
        weights.mean(&difference.unary(Unary::Abs)?)
    }
}

crate::register_loss!(Mae);
