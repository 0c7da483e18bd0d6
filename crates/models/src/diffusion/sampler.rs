//! Sampling: from noise to a sample, step by step down the noise levels.

use isobar_array::{Array, Generator};
use isobar_nn::BatchPart;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::normal;
use super::precond::Denoiser;
use super::schedule::EdmSchedule;
use crate::error::{Checker, Result};

/// Method of a sampler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SamplerKind {
    /// Heun's method; the noise added at a step has no bound (PhysicsNeMo's `stochastic_sampler`).
    Legacy,
    /// Heun's method; a step raises the noise level by a factor of √2 at most (PhysicsNeMo's `EDMStochasticHeunSolver`).
    #[default]
    EdmStochasticHeun,
    /// Euler's method, with the same bound (PhysicsNeMo's `EDMStochasticEulerSolver`).
    EdmStochasticEuler,
}

/// The stochastic sampler of Karras et al., arXiv:2206.00364, Algorithm 2, for a denoiser D. With the noise levels σ_i of
/// [`EdmSchedule`] and x₀ = σ₀ · latents, step i of n computes
///
/// ```text
/// γ = S_churn / n if S_min ≤ σ ≤ S_max, else 0            at most √2 − 1, but for the legacy sampler
/// σ̂ = σ (1 + γ)     x̂ = x + √(σ̂² − σ²) S_noise ε          ε ~ N(0, 1)
/// h = σ' − σ̂        d = (x̂ − D(x̂, σ̂)) / σ̂                σ' the next level
/// x' = x̂ + h d                                             Euler, and every last step
/// d' = (x̂ + α h d − D(x̂ + α h d, σ̂ + α h)) / (σ̂ + α h)
/// x' = x̂ + h ((1 − 1/2α) d + 1/2α d')                      Heun
/// ```
///
/// ε is drawn at every step, one draw each, also where γ = 0. It is that of the global array: a sample does not depend on the number of
/// ranks. No gradients are recorded.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::EdmSampler;
/// use tch::{Device, Kind, Tensor};
///
/// // The denoiser of data that is 3 everywhere.
/// let sampler = EdmSampler { s_churn: 5.0, ..EdmSampler::default() };
/// let like = Tensor::zeros([2, 1, 4, 4], (Kind::Double, Device::Cpu));
/// let sample = sampler.sample(&like, &Generator::new(1), None, |x, _sigma| Ok(x.full_like(3.0)))?;
/// assert!((sample - 3.0).abs().max().double_value(&[]) < 1e-12);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EdmSampler {
    /// Method.
    pub sampler: SamplerKind,
    /// Number of steps.
    pub num_steps: usize,
    /// Lowest noise level before 0.
    pub sigma_min: f64,
    /// Highest noise level.
    pub sigma_max: f64,
    /// Exponent of the noise levels.
    pub rho: f64,
    /// Amount of noise added, over all steps.
    #[serde(rename = "S_churn")]
    pub s_churn: f64,
    /// Lowest noise level at which noise is added.
    #[serde(rename = "S_min")]
    pub s_min: f64,
    /// Highest noise level at which noise is added; no upper limit where not given.
    #[serde(rename = "S_max")]
    pub s_max: Option<f64>,
    /// Standard deviation of the added noise.
    #[serde(rename = "S_noise")]
    pub s_noise: f64,
    /// Position of Heun's second evaluation within a step, above 0; 1 is the end of the step. `legacy` supports 1 only.
    pub alpha: f64,
}

/// Most noise that a sampler adds: more has no place beside the data in single precision.
const MOST_NOISE: f64 = 1e6;

impl Default for EdmSampler {
    /// The deterministic Heun sampler with 18 steps from 80 down to 0.002.
    fn default() -> Self {
        Self {
            sampler: SamplerKind::default(),
            num_steps: 18,
            sigma_min: 0.002,
            sigma_max: 80.0,
            rho: 7.0,
            s_churn: 0.0,
            s_min: 0.0,
            s_max: None,
            s_noise: 1.0,
            alpha: 1.0,
        }
    }
}

impl EdmSampler {
    /// Returns the defaults of PhysicsNeMo's `stochastic_sampler` for a network for noise levels from `sigma_min` to `sigma_max`: 18
    /// steps from 800 down to 0.002, within those levels.
    ///
    /// ```
    /// use isobar_models::EdmSampler;
    ///
    /// assert_eq!(EdmSampler::legacy(0.0, 100.0).sigma_max, 100.0);
    /// ```
    pub fn legacy(sigma_min: f64, sigma_max: f64) -> Self {
        let schedule = EdmSchedule { sigma_max: 800.0, ..Self::default().schedule() };
        let EdmSchedule { sigma_min, sigma_max, .. } = schedule.clamped(sigma_min, sigma_max);
        Self { sampler: SamplerKind::Legacy, sigma_min, sigma_max, ..Self::default() }
    }

    /// Restricts the noise levels to those that a denoiser accepts.
    #[must_use]
    pub fn within(self, denoiser: &Denoiser) -> Self {
        let schedule = self.schedule().clamped(denoiser.sigma_min, denoiser.sigma_max);
        Self { sigma_min: schedule.sigma_min, sigma_max: schedule.sigma_max, ..self }
    }

    /// The noise levels.
    pub fn schedule(&self) -> EdmSchedule {
        let Self { num_steps, sigma_min, sigma_max, rho, .. } = *self;
        EdmSchedule { num_steps, sigma_min, sigma_max, rho }
    }

    /// Draws the latents, of the shape, dtype and layout of `like` `[batch, …]`, and the noise of each step from `generator`, and
    /// samples. `batch` says which part of the global batch is sampled; `None` means all of it. All ranks call, with generators of equal
    /// state.
    ///
    /// # Errors
    ///
    /// As [`sample_from`](Self::sample_from); a part of the batch that does not fit.
    pub fn sample<A: Array>(
        &self,
        like: &A,
        generator: &Generator,
        batch: Option<BatchPart>,
        denoise: impl Fn(&A, f64) -> Result<A>,
    ) -> Result<A> {
        self.check()?;
        let latents = normal(like, generator, batch)?;
        self.sample_from(&latents, |_| normal(like, generator, batch), denoise)
    }

    /// Samples from `latents`, standard normal, with `noise(i)` of the same shape at step i. `denoise` is given a noisy array and its
    /// noise level.
    ///
    /// # Errors
    ///
    /// Noise levels that [`EdmSchedule::sigmas`] refuses; `alpha` outside (0, 1]; numbers that are not finite or below 0; or the
    /// denoiser or an operator fails.
    pub fn sample_from<A: Array>(
        &self,
        latents: &A,
        mut noise: impl FnMut(usize) -> Result<A>,
        denoise: impl Fn(&A, f64) -> Result<A>,
    ) -> Result<A> {
        self.check()?;
        let sigmas = self.schedule().sigmas()?;
        tch::no_grad(|| {
            let mut x = latents.mul_scalar(sigmas[0])?;
            for (i, pair) in sigmas.windows(2).enumerate() {
                let churned = self.churned(pair[0]);
                // The square root is 0 without churn; the noise is drawn all the same.
                let added = (churned * churned - pair[0] * pair[0]).max(0.0).sqrt() * self.s_noise;
                x = x.add(&noise(i)?.mul_scalar(added)?)?;
                x = self.step(&x, [churned, pair[1]], &denoise)?;
            }
            Ok(x)
        })
    }

    /// Noise level after noise was added at level `sigma`.
    fn churned(&self, sigma: f64) -> f64 {
        if sigma < self.s_min || self.s_max.is_some_and(|s_max| sigma > s_max) {
            return sigma;
        }
        let gamma = self.s_churn / self.num_steps as f64;
        sigma
            * (1.0
                + match self.sampler {
                    SamplerKind::Legacy => gamma,
                    _ => gamma.min(2f64.sqrt() - 1.0),
                })
    }

    fn step<A: Array>(
        &self,
        x: &A,
        [sigma, next]: [f64; 2],
        denoise: &impl Fn(&A, f64) -> Result<A>,
    ) -> Result<A> {
        let slope =
            |x: &A, sigma: f64| -> Result<A> { Ok(x.sub(&denoise(x, sigma)?)?.mul_scalar(sigma.recip())?) };
        let h = next - sigma;
        let mut d = slope(x, sigma)?;
        if next > 0.0 && self.sampler != SamplerKind::EdmStochasticEuler {
            let middle = x.add(&d.mul_scalar(self.alpha * h)?)?;
            let late = slope(&middle, sigma + self.alpha * h)?;
            let weight = 0.5 / self.alpha;
            d = d.mul_scalar(1.0 - weight)?.add(&late.mul_scalar(weight)?)?;
        }
        Ok(x.add(&d.mul_scalar(h)?)?)
    }

    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// Those of [`sample_from`](Self::sample_from).
    pub fn check(&self) -> Result<()> {
        let check = Checker("edm_sampler");
        for (name, value) in [("S_churn", self.s_churn), ("S_min", self.s_min), ("S_noise", self.s_noise)] {
            check.ensure((0.0..=MOST_NOISE).contains(&value), || {
                format!("{name} is {value:?}, expected a number from 0 to {MOST_NOISE}")
            })?;
        }
        check.ensure(self.s_max.is_none_or(|s_max| s_max >= self.s_min), || {
            let s_max = self.s_max.unwrap_or_default();
            format!(
                "S_max is {s_max}, expected at least S_min = {}; leave it out for no upper limit",
                self.s_min
            )
        })?;
        check.ensure(self.alpha > 0.0 && self.alpha <= 1.0, || {
            format!("alpha is {}, expected above 0 and at most 1", self.alpha)
        })?;
        check.ensure(self.alpha == 1.0 || self.sampler != SamplerKind::Legacy, || {
            format!("alpha is {}, expected 1, as the legacy sampler has it", self.alpha)
        })?;
        self.schedule().sigmas().map(drop)
    }
}
