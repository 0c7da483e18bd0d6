//! Dispersion: u_t = ξ Σ ∂ᵢ³u.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, finite};
use crate::{Result, register_system};

register_system!(Dispersion);

/// Settings of dispersion, u_t = ξ Σ ∂ᵢ³u.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Dispersion {
    /// Dispersivity ξ.
    pub dispersivity: f64,
}

impl Default for Dispersion {
    fn default() -> Self {
        Self { dispersivity: 8e-6 }
    }
}

impl Registered for Dispersion {
    const NAME: &'static str = "dispersion";
    const SUMMARY: &'static str = "Dispersion, u_t = ξ Σ ∂ᵢ³u.";
}

impl System for Dispersion {
    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        finite("dispersivity", self.dispersivity)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        let mut sum: Option<Tensor> = None;
        for dim in 0..spectrum.domain().dims {
            let slope = spectrum.derivative(dim)?;
            let third = slope.f_mul(slope)?.f_mul(slope)?.f_mul_scalar(self.dispersivity)?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&third)?,
                None => third,
            });
        }
        sum.map_or_else(|| spectrum.laplacian(), Ok)
    }
}
