//! The equation of Fisher, Kolmogorov, Petrovsky and Piskunov: u_t = ν Δu + r u (1 − u).

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least};
use crate::{Result, register_system};

register_system!(FisherKpp);

/// Settings of the Fisher–KPP equation, u_t = ν Δu + r u (1 − u).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FisherKpp {
    /// Diffusivity ν, at least 0.
    pub diffusivity: f64,
    /// Growth rate r, at least 0.
    pub rate: f64,
}

impl Default for FisherKpp {
    fn default() -> Self {
        Self { diffusivity: 1e-3, rate: 1.0 }
    }
}

impl Registered for FisherKpp {
    const NAME: &'static str = "fisher_kpp";
    const SUMMARY: &'static str = "The Fisher–KPP equation, u_t = ν Δu + r u (1 − u).";
}

impl System for FisherKpp {
    fn defaults(&self) -> Defaults {
        Defaults { substeps: 2, ..Defaults::default() }
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        at_least("diffusivity", self.diffusivity, 0.0)?;
        at_least("rate", self.rate, 0.0)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        Ok(spectrum.laplacian()?.f_mul_scalar(self.diffusivity)?.f_add_scalar(self.rate)?)
    }

    fn degree(&self) -> usize {
        2
    }

    fn nonlinear(&self, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        let u = spectrum.inverse(hat)?;
        spectrum.forward(&u.f_mul(&u)?.f_mul_scalar(-self.rate)?)
    }

    /// Populations from 0 to 1.
    fn start(&self, random: Tensor) -> Result<Tensor> {
        Ok(random.f_mul_scalar(0.5)?.f_add_scalar(0.5)?.f_clamp(0.0, 1.0)?)
    }
}
