//! Relative error.

use isobar_array::{Array, Reduction};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Loss, LossArray, Support, Weighting};
use crate::error::Result;

/// Mean over samples of ‖p − t‖ / ‖t‖.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RelativeL2 {}

impl Registered for RelativeL2 {
    const NAME: &'static str = "relative_l2";
    const SUMMARY: &'static str = "Mean over samples of ‖p − t‖ / ‖t‖.";
}

impl Loss for RelativeL2 {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        Ok(relative(&prediction.sub(target)?, target)?.mean()?)
    }

    fn support(&self) -> Support {
        Support::WEIGHTS
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        let (prediction, target) = (weights.scale_by_root(prediction)?, weights.scale_by_root(target)?);
        Ok(weights.quotient(&prediction.sub(&target)?, &target)?.mean()?)
    }
}

/// ‖d‖ / ‖t‖ of each sample.
pub(super) fn relative<A: Array>(difference: &A, target: &A) -> isobar_array::Result<A> {
    let dims: Vec<i64> = (1..target.shape().len() as i64).collect();
    let norm = |x: &A| x.reduce(Reduction::Norm, &dims, false);
    norm(difference)?.div(&norm(target)?)
}

crate::register_loss!(RelativeL2);
