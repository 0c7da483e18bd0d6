//! Advection and diffusion: u_t + c · ∇u = ν Δu.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::advection::{check_velocity, transport};
use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least, complex};
use crate::{Result, register_system};

register_system!(AdvectionDiffusion);

/// Settings of advection and diffusion, u_t + c · ∇u = ν Δu.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdvectionDiffusion {
    /// Velocity c: a number for each dim, or one for all.
    pub velocity: Vec<f64>,
    /// Diffusivity ν, at least 0.
    pub diffusivity: f64,
}

impl Default for AdvectionDiffusion {
    fn default() -> Self {
        Self { velocity: vec![0.25], diffusivity: 8e-4 }
    }
}

impl Registered for AdvectionDiffusion {
    const NAME: &'static str = "advection_diffusion";
    const SUMMARY: &'static str = "Advection and diffusion, u_t + c·∇u = ν Δu.";
}

impl System for AdvectionDiffusion {
    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    fn check_settings(&self, domain: &Domain) -> Result<()> {
        check_velocity(&self.velocity, domain)?;
        at_least("diffusivity", self.diffusivity, 0.0)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        let diffusion = complex(&spectrum.laplacian()?.f_mul_scalar(self.diffusivity)?)?;
        Ok(transport(&self.velocity, spectrum)?.f_add(&diffusion)?)
    }
}
