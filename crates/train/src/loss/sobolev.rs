//! Relative error of a field and its derivatives.

use isobar_array::{Array, periodic};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::Loss;
use super::relative_l2::relative;
use crate::error::{Error, Result};

/// Mean over samples of ‖p − t‖ / ‖t‖ in the norm of the Sobolev space Hˢ, s being `order`: of fields whose modes of wave vector k
/// are weighted by (1 + |k|²)^(s/2) (Li et al., "Learning chaotic dynamics in dissipative systems", 2022). Fields are
/// taken as periodic, with a period of 2π along every spatial dim.
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

impl Loss for Sobolev {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        let dims: Vec<i64> = (2..target.shape().len() as i64).collect();
        let domain = periodic::Domain::unit(&dims);
        let weighted = |field: &A| periodic::bessel_potential(field, &domain, -self.order);
        Ok(relative(&weighted(&prediction.sub(target)?)?, &weighted(target)?)?.mean()?)
    }

    fn check(&self) -> Result<()> {
        match (0.0..=4.0).contains(&self.order) {
            true => Ok(()),
            false => Err(Error::setting("train.loss.order", self.order, "a number from 0 to 4", "1.0")),
        }
    }
}

crate::register_loss!(Sobolev);
