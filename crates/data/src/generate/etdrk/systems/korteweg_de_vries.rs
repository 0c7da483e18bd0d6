//! The Korteweg–de Vries equation: u_t + b/2 Σ ∂ᵢu² + a Σ ∂ᵢΔu = ν Δu − μ Δ²u.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least, complex, finite};
use crate::{Result, register_system};

register_system!(KortewegDeVries);

/// Settings of the Korteweg–de Vries equation, u_t + b/2 Σ ∂ᵢu² + a Σ ∂ᵢΔu = ν Δu − μ Δ²u; in one dim u_t + b u u_x + a u_xxx.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KortewegDeVries {
    /// Coefficient b of the convection.
    pub convection: f64,
    /// Coefficient a of the dispersion.
    pub dispersion: f64,
    /// Diffusivity ν, at least 0.
    pub diffusivity: f64,
    /// Hyper-diffusivity μ, at least 0.
    pub hyper_diffusivity: f64,
}

impl Default for KortewegDeVries {
    fn default() -> Self {
        Self { convection: 6.0, dispersion: 1.0, diffusivity: 0.0, hyper_diffusivity: 0.0 }
    }
}

impl Registered for KortewegDeVries {
    const NAME: &'static str = "korteweg_de_vries";
    const SUMMARY: &'static str =
        "The Korteweg–de Vries equation, u_t + b u u_x + a u_xxx = ν u_xx − μ u_xxxx.";
}

impl System for KortewegDeVries {
    fn defaults(&self) -> Defaults {
        Defaults { length: 40.0, dt: 0.1, substeps: 10, ..Defaults::default() }
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        finite("convection", self.convection)?;
        finite("dispersion", self.dispersion)?;
        at_least("diffusivity", self.diffusivity, 0.0)?;
        at_least("hyper_diffusivity", self.hyper_diffusivity, 0.0)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        let laplacian = spectrum.laplacian()?;
        let damping = laplacian
            .f_mul_scalar(self.diffusivity)?
            .f_sub(&laplacian.f_mul(&laplacian)?.f_mul_scalar(self.hyper_diffusivity)?)?;
        let dispersion = slopes(spectrum)?.f_mul(&laplacian)?.f_mul_scalar(-self.dispersion)?;
        Ok(dispersion.f_add(&complex(&damping)?)?)
    }

    fn degree(&self) -> usize {
        2
    }

    fn nonlinear(&self, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        let u = spectrum.inverse(hat)?;
        let square = spectrum.forward(&u.f_mul(&u)?)?;
        Ok(square.f_mul(&slopes(spectrum)?)?.f_mul_scalar(-0.5 * self.convection)?)
    }
}

/// Factors of Σ ∂ᵢ.
fn slopes(spectrum: &Spectrum) -> Result<Tensor> {
    let mut sum = spectrum.derivative(0)?.shallow_clone();
    for dim in 1..spectrum.domain().dims {
        sum = sum.f_add(spectrum.derivative(dim)?)?;
    }
    Ok(sum)
}
