//! Hyper-diffusion: u_t = −μ Δ²u.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least};
use crate::{Result, register_system};

register_system!(HyperDiffusion);

/// Settings of hyper-diffusion, u_t = −μ Δ²u.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HyperDiffusion {
    /// Hyper-diffusivity μ, at least 0.
    pub hyper_diffusivity: f64,
}

impl Default for HyperDiffusion {
    fn default() -> Self {
        Self { hyper_diffusivity: 3e-8 }
    }
}

impl Registered for HyperDiffusion {
    const NAME: &'static str = "hyper_diffusion";
    const SUMMARY: &'static str = "Hyper-diffusion, u_t = −μ Δ²u.";
}

impl System for HyperDiffusion {
    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        at_least("hyper_diffusivity", self.hyper_diffusivity, 0.0)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        let laplacian = spectrum.laplacian()?;
        Ok(laplacian.f_mul(&laplacian)?.f_mul_scalar(-self.hyper_diffusivity)?)
    }
}
