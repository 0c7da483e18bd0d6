//! Burgers' equation: u_t + (u · ∇)u = ν Δu.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least};
use crate::{Result, register_system};

register_system!(Burgers);

/// Settings of Burgers' equation, u_t + (u · ∇)u = ν Δu, of a velocity u with a component for each dim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Burgers {
    /// Viscosity ν, at least 0.
    pub viscosity: f64,
}

impl Default for Burgers {
    fn default() -> Self {
        Self { viscosity: 0.05 }
    }
}

impl Registered for Burgers {
    const NAME: &'static str = "burgers";
    const SUMMARY: &'static str = "Burgers' equation, u_t + (u·∇)u = ν Δu.";
}

impl System for Burgers {
    fn defaults(&self) -> Defaults {
        Defaults { length: std::f64::consts::TAU, dt: 0.05, substeps: 5, ..Defaults::default() }
    }

    fn fields(&self) -> Vec<(&'static str, usize)> {
        vec![("velocity", 1)]
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        at_least("viscosity", self.viscosity, 0.0)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        Ok(spectrum.laplacian()?.f_mul_scalar(self.viscosity)?)
    }

    fn degree(&self) -> usize {
        2
    }

    fn nonlinear(&self, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        let u = spectrum.inverse(hat)?;
        let mut sum: Option<Tensor> = None;
        for dim in 0..spectrum.domain().dims {
            let slope = spectrum.inverse(&hat.f_mul(spectrum.derivative(dim)?)?)?;
            let carried = u.f_narrow(1, dim as i64, 1)?.f_mul(&slope)?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&carried)?,
                None => carried,
            });
        }
        spectrum.forward(&sum.unwrap_or(u).f_neg()?)
    }
}
