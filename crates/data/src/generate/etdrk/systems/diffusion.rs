//! Diffusion: u_t = ν Δu.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least};
use crate::{Result, register_system};

register_system!(Diffusion);

/// Settings of diffusion, u_t = ν Δu.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Diffusion {
    /// Diffusivity ν, at least 0.
    pub diffusivity: f64,
}

impl Default for Diffusion {
    fn default() -> Self {
        Self { diffusivity: 8e-4 }
    }
}

impl Registered for Diffusion {
    const NAME: &'static str = "diffusion";
    const SUMMARY: &'static str = "Diffusion, u_t = ν Δu.";
}

impl System for Diffusion {
    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        at_least("diffusivity", self.diffusivity, 0.0)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        Ok(spectrum.laplacian()?.f_mul_scalar(self.diffusivity)?)
    }
}
