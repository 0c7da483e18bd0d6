//! The Swift–Hohenberg equation: u_t = r u − (1 + Δ)²u + g u² − u³.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, finite};
use crate::{Result, register_system};

register_system!(SwiftHohenberg);

/// Settings of the Swift–Hohenberg equation, u_t = r u − (1 + Δ)²u + g u² − u³.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SwiftHohenberg {
    /// Growth rate r of the pattern.
    pub growth: f64,
    /// Coefficient g of the quadratic term.
    pub quadratic: f64,
}

impl Default for SwiftHohenberg {
    fn default() -> Self {
        Self { growth: 0.7, quadratic: 1.0 }
    }
}

impl Registered for SwiftHohenberg {
    const NAME: &'static str = "swift_hohenberg";
    const SUMMARY: &'static str = "The Swift–Hohenberg equation, u_t = r u − (1 + Δ)²u + g u² − u³.";
}

impl System for SwiftHohenberg {
    fn defaults(&self) -> Defaults {
        Defaults { dims: 2, length: 40.0, dt: 0.5, substeps: 10, ..Defaults::default() }
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        finite("growth", self.growth)?;
        finite("quadratic", self.quadratic)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        let ring = spectrum.laplacian()?.f_add_scalar(1.0)?;
        Ok(ring.f_mul(&ring)?.f_neg()?.f_add_scalar(self.growth)?)
    }

    fn degree(&self) -> usize {
        3
    }

    fn nonlinear(&self, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        let u = spectrum.inverse(hat)?;
        // (g − u) u²
        let factor = u.f_neg()?.f_add_scalar(self.quadratic)?;
        spectrum.forward(&factor.f_mul(&u)?.f_mul(&u)?)
    }
}
