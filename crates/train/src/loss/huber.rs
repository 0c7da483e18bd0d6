//! Huber's loss.

use isobar_array::{Array, Unary};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Loss, LossArray, Support, Weighting};
use crate::error::{Error, Result};

/// Mean over all elements of e²/2 where e = |p − t| is below `delta`, and of `delta`·(e − `delta`/2) elsewhere (Huber, "Robust
/// estimation of a location parameter", 1964): PyTorch's `HuberLoss`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Huber {
    /// Threshold between quadratic and linear loss, in units of normalised values; above 0.
    pub delta: f64,
}

impl Default for Huber {
    fn default() -> Self {
        Self { delta: 1.0 }
    }
}

impl Registered for Huber {
    const NAME: &'static str = "huber";
    const SUMMARY: &'static str = "Squared error of small differences, absolute error of large ones.";
}

impl Huber {
    /// The loss of each element.
    fn errors<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        let error = prediction.sub(target)?.unary(Unary::Abs)?;
        let small = error.unary(Unary::Clamp { min: 0.0, max: self.delta })?;
        Ok(small.mul(&error.sub(&small.mul_scalar(0.5)?)?)?)
    }
}

impl Loss for Huber {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        Ok(self.errors(prediction, target)?.mean()?)
    }

    fn support(&self) -> Support {
        Support::WEIGHTS
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        weights.mean(&self.errors(&weights.fill(prediction)?, &weights.fill(target)?)?)
    }

    fn check(&self) -> Result<()> {
        match self.delta.is_finite() && self.delta > 0.0 {
            true => Ok(()),
            false => Err(Error::setting("train.loss.delta", self.delta, "a finite number above 0", "1.0")),
        }
    }
}

crate::register_loss!(Huber);
