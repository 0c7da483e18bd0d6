//! Advection: u_t + c · ∇u = 0.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, finite};
use crate::{Error, Result, register_system};

register_system!(Advection);

/// Settings of advection, u_t + c · ∇u = 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Advection {
    /// Velocity c: a number for each dim, or one for all.
    pub velocity: Vec<f64>,
}

impl Default for Advection {
    fn default() -> Self {
        Self { velocity: vec![0.25] }
    }
}

impl Registered for Advection {
    const NAME: &'static str = "advection";
    const SUMMARY: &'static str = "Advection, u_t + c·∇u = 0.";
}

impl System for Advection {
    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    fn check_settings(&self, domain: &Domain) -> Result<()> {
        check_velocity(&self.velocity, domain)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        transport(&self.velocity, spectrum)
    }
}

/// Rejects a velocity that has neither one number nor one for each dim.
pub(super) fn check_velocity(velocity: &[f64], domain: &Domain) -> Result<()> {
    velocity.iter().try_for_each(|&component| finite("velocity", component))?;
    if velocity.len() == 1 || velocity.len() == domain.dims {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "system.velocity has {} numbers, expected 1 or {}, one for each dim; --set system.velocity=[0.25]",
        velocity.len(),
        domain.dims
    )))
}

/// Factors of −c · ∇.
pub(super) fn transport(velocity: &[f64], spectrum: &Spectrum) -> Result<Tensor> {
    let component = |dim: usize| velocity.get(dim).or(velocity.first()).copied().unwrap_or(0.0);
    let mut sum = spectrum.derivative(0)?.f_mul_scalar(-component(0))?;
    for dim in 1..spectrum.domain().dims {
        sum = sum.f_sub(&spectrum.derivative(dim)?.f_mul_scalar(component(dim))?)?;
    }
    Ok(sum)
}
