//! Relative error of a field and its derivatives.

use isobar_array::{Array, periodic};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::relative_l2::relative;
use super::{Loss, LossArray, Support, Weighting};
use crate::error::{Error, Result};

/// Mean over samples of ‖p − t‖ / ‖t‖ in the norm of the Sobolev space Hˢ, s being `order`: of fields whose modes of wave vector k
/// are weighted by (1 + |k|²)^(s/2) (Li et al., "Learning chaotic dynamics in dissipative systems", 2022). Fields are
/// taken as periodic, with a period of 2π along every spatial dim. Masked points count as zero in both fields.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sobolev {
    /// Order s of the norm, which may be a fraction; from 0 (`relative_l2`) to 4.
    pub order: f64,
}

impl Default for Sobolev {
    fn default() -> Self {
        Self { order: 1.0 }
    }
}

impl Registered for Sobolev {
    const NAME: &'static str = "sobolev";
    const SUMMARY: &'static str = "Relative error of periodic fields and of their derivatives.";
}

impl Sobolev {
    /// The field whose norm is the field's in Hˢ.
    fn potential<A: Array>(&self, field: &A) -> isobar_array::Result<A> {
        let dims: Vec<i64> = (2..field.shape().len() as i64).collect();
        periodic::bessel_potential(field, &periodic::Domain::unit(&dims), -self.order)
    }
}

impl Loss for Sobolev {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        let potential = |field: &A| self.potential(field);
        Ok(relative(&potential(&prediction.sub(target)?)?, &potential(target)?)?.mean()?)
    }

    fn support(&self) -> Support {
        Support::CHANNELS
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        let weights = weights.without_area();
        let (prediction, target) = (weights.scale_by_root(prediction)?, weights.scale_by_root(target)?);
        let difference = self.potential(&prediction.sub(&target)?)?;
        Ok(weights.quotient(&difference, &self.potential(&target)?)?.mean()?)
    }

    fn check(&self) -> Result<()> {
        match (0.0..=4.0).contains(&self.order) {
            true => Ok(()),
            false => Err(Error::setting("train.loss.order", self.order, "a number from 0 to 4", "1.0")),
        }
    }
}

crate::register_loss!(Sobolev);
