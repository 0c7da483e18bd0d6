//! The Gray–Scott model of two reacting substances.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::initial::{Initial, InitialKind};
use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System, at_least};
use crate::{Result, register_system};

register_system!(GrayScott);

/// Settings of the Gray–Scott model, u_t = D_u Δu − u v² + F (1 − u) and v_t = D_v Δv + u v² − (F + k) v.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GrayScott {
    /// Diffusivity D_u, at least 0.
    pub diffusivity_u: f64,
    /// Diffusivity D_v, at least 0.
    pub diffusivity_v: f64,
    /// Feed rate F, at least 0.
    pub feed: f64,
    /// Kill rate k, at least 0.
    pub kill: f64,
}

impl Default for GrayScott {
    fn default() -> Self {
        Self { diffusivity_u: 2e-5, diffusivity_v: 1e-5, feed: 0.04, kill: 0.06 }
    }
}

impl Registered for GrayScott {
    const NAME: &'static str = "gray_scott";
    const SUMMARY: &'static str =
        "The Gray–Scott model, u_t = D_u Δu − u v² + F (1 − u), v_t = D_v Δv + u v² − (F + k) v.";
}

impl System for GrayScott {
    fn defaults(&self) -> Defaults {
        Defaults { dims: 2, dt: 20.0, substeps: 20, ..Defaults::default() }
    }

    fn fields(&self) -> Vec<(&'static str, usize)> {
        vec![("u", 0), ("v", 0)]
    }

    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        at_least("diffusivity_u", self.diffusivity_u, 0.0)?;
        at_least("diffusivity_v", self.diffusivity_v, 0.0)?;
        at_least("feed", self.feed, 0.0)?;
        at_least("kill", self.kill, 0.0)
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        let laplacian = spectrum.laplacian()?;
        let u = laplacian.f_mul_scalar(self.diffusivity_u)?.f_sub_scalar(self.feed)?;
        let v = laplacian.f_mul_scalar(self.diffusivity_v)?.f_sub_scalar(self.feed + self.kill)?;
        Ok(Tensor::f_stack(&[u, v], 0)?)
    }

    fn degree(&self) -> usize {
        3
    }

    fn nonlinear(&self, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        let fields = spectrum.inverse(hat)?;
        let (u, v) = (fields.f_narrow(1, 0, 1)?, fields.f_narrow(1, 1, 1)?);
        let reaction = u.f_mul(&v)?.f_mul(&v)?;
        let gain = reaction.f_neg()?.f_add_scalar(self.feed)?;
        spectrum.forward(&Tensor::f_cat(&[gain, reaction], 1)?)
    }

    fn initial(&self) -> Initial {
        Initial { kind: InitialKind::Blobs, amplitude: 1.0, ..Initial::default() }
    }

    fn draws(&self, _dims: usize) -> usize {
        1
    }

    /// Blobs of v where u is used up.
    fn start(&self, random: Tensor) -> Result<Tensor> {
        // Smoothly at most 1.
        let v = random.f_tanh()?;
        Ok(Tensor::f_cat(&[v.f_neg()?.f_add_scalar(1.0)?, v], 0)?)
    }
}
