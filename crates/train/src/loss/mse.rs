//! Mean squared error.

use isobar_array::{Array, Unary};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Loss, LossArray, Support, Weighting};
use crate::error::Result;

/// Mean over all elements of (p − t)².
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mse {}

impl Registered for Mse {
    const NAME: &'static str = "mse";
    const SUMMARY: &'static str = "Mean squared error.";
}

impl Loss for Mse {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        Ok(prediction.mse_loss(target)?)
    }

    fn support(&self) -> Support {
        Support::WEIGHTS
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        let difference = weights.fill(prediction)?.sub(&weights.fill(target)?)?;
        weights.mean(&difference.unary(Unary::Square)?)
    }
}

crate::register_loss!(Mse);
