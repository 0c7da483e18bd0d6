//! Two-dimensional Navier–Stokes flow, by its vorticity.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::initial::{Initial, InitialKind};
use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least, finite};
use crate::{Result, register_system};

register_system!(NavierStokes);

/// Settings of incompressible flow in two dims, ω_t + u · ∇ω = ν Δω − α ω + f, with the velocity u = (∂_y ψ, −∂_x ψ), Δψ = −ω, and the force f = A (sin(2π k (x + y) / L) + cos(2π k (x + y) / L)) of Li et al. (ICLR 2021).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NavierStokes {
    /// Viscosity ν, at least 0.
    pub viscosity: f64,
    /// Drag α, at least 0.
    pub drag: f64,
    /// Amplitude A of the force.
    pub force: f64,
    /// Number k of waves of the force along each side.
    pub force_waves: u32,
}

impl Default for NavierStokes {
    fn default() -> Self {
        Self { viscosity: 1e-3, drag: 0.0, force: 0.1, force_waves: 1 }
    }
}

impl Registered for NavierStokes {
    const NAME: &'static str = "navier_stokes";
    const SUMMARY: &'static str = "Incompressible flow in two dims, ω_t + u·∇ω = ν Δω − α ω + f.";
}

impl System for NavierStokes {
    fn dims(&self) -> std::ops::RangeInclusive<usize> {
        2..=2
    }

    fn defaults(&self) -> Defaults {
        Defaults { dims: 2, dt: 1.0, substeps: 50, ..Defaults::default() }
    }

    fn fields(&self) -> Vec<(&'static str, usize)> {
        vec![("vorticity", 0)]
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        at_least("viscosity", self.viscosity, 0.0)?;
        at_least("drag", self.drag, 0.0)?;
        finite("force", self.force)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        Ok(spectrum.laplacian()?.f_mul_scalar(self.viscosity)?.f_sub_scalar(self.drag)?)
    }

    fn degree(&self) -> usize {
        2
    }

    fn nonlinear(&self, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        let minus_laplacian = spectrum.laplacian()?.f_neg()?;
        // The mean has no stream function: any divisor but 0 will do, since its derivatives are 0.
        let divisor =
            minus_laplacian.f_add(&minus_laplacian.f_eq(0.0)?.f_to_kind(minus_laplacian.kind())?)?;
        let stream = hat.f_div(&divisor)?;
        let slope = |of: &Tensor, dim: usize| spectrum.inverse(&of.f_mul(spectrum.derivative(dim)?)?);
        let x = slope(&stream, 1)?.f_mul(&slope(hat, 0)?)?;
        let y = slope(&stream, 0)?.f_mul(&slope(hat, 1)?)?;
        spectrum.forward(&y.f_sub(&x)?.f_add(&self.force(spectrum.domain())?)?)
    }

    fn initial(&self) -> Initial {
        Initial { kind: InitialKind::GaussianField, ..Initial::default() }
    }
}

impl NavierStokes {
    fn force(&self, domain: Domain) -> Result<Tensor> {
        let line = Tensor::f_from_slice(&domain.coordinates())?;
        let waves = std::f64::consts::TAU * f64::from(self.force_waves) / domain.length;
        let phase = line.f_unsqueeze(1)?.f_add(&line)?.f_mul_scalar(waves)?;
        Ok(phase.f_sin()?.f_add(&phase.f_cos()?)?.f_mul_scalar(self.force)?)
    }
}
