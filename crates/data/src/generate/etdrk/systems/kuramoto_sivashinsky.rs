//! The Kuramoto–Sivashinsky equation: u_t + ½ |∇u|² + Δu + Δ²u = 0.

use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::generate::etdrk::spectrum::{Domain, Spectrum};
use crate::generate::etdrk::system::{Defaults, System};
use crate::{Error, Result, register_system};

register_system!(KuramotoSivashinsky);

/// Settings of the Kuramoto–Sivashinsky equation, u_t + ½ |∇u|² + Δu + Δ²u = 0, with the mean of u held where it is; or its derivative, u_t + u u_x + u_xx + u_xxxx = 0.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KuramotoSivashinsky {
    /// True for the conservative form of one dim, with u u_x.
    pub conservative: bool,
}

impl Registered for KuramotoSivashinsky {
    const NAME: &'static str = "kuramoto_sivashinsky";
    const SUMMARY: &'static str =
        "The Kuramoto–Sivashinsky equation, u_t + ½|∇u|² + Δu + Δ²u = 0, or u_t + u u_x + u_xx + u_xxxx = 0.";
}

impl System for KuramotoSivashinsky {
    fn defaults(&self) -> Defaults {
        Defaults { length: 60.0, dt: 0.5, substeps: 5, warm_up: 200, ..Defaults::default() }
    }

    fn check_settings(&self, domain: &Domain) -> Result<()> {
        if self.conservative && domain.dims > 1 {
            return Err(Error::Invalid(format!(
                "system.conservative is of one dim, but dims is {}; --set system.conservative=false",
                domain.dims
            )));
        }
        Ok(())
    }

    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
        let laplacian = spectrum.laplacian()?;
        Ok(laplacian.f_mul(&laplacian)?.f_add(&laplacian)?.f_neg()?)
    }

    fn degree(&self) -> usize {
        2
    }

    fn nonlinear(&self, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        if self.conservative {
            let u = spectrum.inverse(hat)?;
            let square = spectrum.forward(&u.f_mul(&u)?)?;
            return Ok(square.f_mul(spectrum.derivative(0)?)?.f_mul_scalar(-0.5)?);
        }
        let mut sum: Option<Tensor> = None;
        for dim in 0..spectrum.domain().dims {
            let slope = spectrum.inverse(&hat.f_mul(spectrum.derivative(dim)?)?)?;
            let square = slope.f_mul(&slope)?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&square)?,
                None => square,
            });
        }
        let Some(squares) = sum else { return Ok(hat.f_zeros_like()?) };
        // The mean only drifts: nothing else depends on it.
        let space: Vec<i64> = (-(spectrum.domain().dims as i64)..0).collect();
        let mean = squares.f_mean_dim(&space[..], true, None)?;
        spectrum.forward(&squares.f_sub(&mean)?.f_mul_scalar(-0.5)?)
    }
}
