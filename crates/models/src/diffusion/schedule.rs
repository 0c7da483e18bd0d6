//! Noise levels of sampling.

use crate::error::{Checker, Result};

/// Most steps of a sampler.
const MOST_STEPS: usize = 1 << 20;

/// Noise levels of a sampler with n steps, from the highest down, and a 0 at the end:
///
/// ```text
/// σ_i = (σ_max^(1/ρ) + i / (n − 1) · (σ_min^(1/ρ) − σ_max^(1/ρ)))^ρ     i from 0 to n − 1
/// ```
///
/// Equation 5 of Karras et al., arXiv:2206.00364.
///
/// ```
/// use isobar_models::EdmSchedule;
///
/// let sigmas = EdmSchedule { num_steps: 3, sigma_min: 1.0, sigma_max: 9.0, rho: 2.0 }.sigmas()?;
/// assert_eq!(sigmas, [9.0, 4.0, 1.0, 0.0]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EdmSchedule {
    /// Number of steps, at least 1 and at most 2²⁰.
    pub num_steps: usize,
    /// Lowest noise level before 0.
    pub sigma_min: f64,
    /// Highest noise level, at which sampling starts.
    pub sigma_max: f64,
    /// Exponent: the larger, the more of the steps are at low noise levels.
    pub rho: f64,
}

impl EdmSchedule {
    /// Returns the `num_steps` + 1 noise levels.
    ///
    /// # Errors
    ///
    /// No step or too many; levels other than 0 < `sigma_min` ≤ `sigma_max`; an exponent that is 0 or not finite.
    pub fn sigmas(&self) -> Result<Vec<f64>> {
        let Self { num_steps, sigma_min, sigma_max, rho } = *self;
        let check = Checker("edm_schedule");
        check.ensure((1..=MOST_STEPS).contains(&num_steps), || {
            format!("num_steps is {num_steps}, expected 1 to {MOST_STEPS}")
        })?;
        check.ensure(0.0 < sigma_min && sigma_min <= sigma_max && sigma_max.is_finite(), || {
            format!("sigma_min is {sigma_min} and sigma_max {sigma_max}, expected 0 < sigma_min ≤ sigma_max")
        })?;
        check.ensure(rho.is_finite() && rho != 0.0, || {
            format!("rho is {rho}, expected a finite number other than 0")
        })?;
        let (high, low) = (sigma_max.powf(rho.recip()), sigma_min.powf(rho.recip()));
        let intervals = (num_steps - 1).max(1) as f64;
        let level = |i: usize| (high + i as f64 / intervals * (low - high)).powf(rho);
        let levels: Vec<f64> = (0..num_steps).map(level).chain([0.0]).collect();
        check.ensure(levels.iter().all(|level| level.is_finite()), || {
            format!("rho is {rho}, which gives noise levels that are not finite; expected a number such as 7")
        })?;
        Ok(levels)
    }

    /// Limits the noise levels to those for which a network is made.
    #[must_use]
    pub fn clamped(self, sigma_min: f64, sigma_max: f64) -> Self {
        Self { sigma_min: self.sigma_min.max(sigma_min), sigma_max: self.sigma_max.min(sigma_max), ..self }
    }
}
