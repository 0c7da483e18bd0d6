//! Loss of denoisers.

use isobar_array::{Array, Generator, Unary};
use isobar_nn::BatchPart;
use serde::{Deserialize, Serialize};

use super::precond::{SigmaData, for_channels, levels};
use super::{normal, window};
use crate::error::{Checker, Result};

/// Reduction of the losses of all points and channels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossReduction {
    /// Mean over the global array (PhysicsNeMo's `MSEDSMLoss`).
    #[default]
    Mean,
    /// Sum over the global array.
    Sum,
    /// None (PhysicsNeMo's older `EDMLoss`).
    None,
}

/// The loss of a denoiser D on noisy samples:
///
/// ```text
/// ln σ ~ N(P_mean, P_std²)     n ~ N(0, 1)
/// (σ² + s²) / (σ s)² · (D(y + σ n, σ) − y)²
/// ```
///
/// with the standard deviation s of the data. Table 1 of Karras et al., arXiv:2206.00364; PhysicsNeMo's `EDMLoss` and `MSEDSMLoss`.
///
/// σ and n are those of the global batch: the loss is the same on any number of ranks.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::EdmLoss;
/// use tch::{Device, Kind, Tensor};
///
/// let y = Tensor::zeros([4, 1, 8, 8], (Kind::Float, Device::Cpu));
/// let loss = EdmLoss::default();
/// let perfect = loss.draw(&y, &Generator::new(1), None, |_noisy, _sigma| Ok(y.shallow_clone()))?;
/// assert_eq!(perfect.double_value(&[]), 0.0);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EdmLoss {
    /// Mean of ln σ.
    #[serde(rename = "P_mean")]
    pub p_mean: f64,
    /// Standard deviation of ln σ.
    #[serde(rename = "P_std")]
    pub p_std: f64,
    /// Standard deviation of the data.
    pub sigma_data: SigmaData,
    /// Reduction.
    pub reduction: LossReduction,
}

/// Deviations of a normal number that are never drawn in practice.
const RARE: f64 = 6.0;

/// Bound of the logarithm of noise levels: their squares are within the range of single precision.
const MOST_LOG: f64 = 40.0;

impl Default for EdmLoss {
    fn default() -> Self {
        Self {
            p_mean: -1.2,
            p_std: 1.2,
            sigma_data: SigmaData::default(),
            reduction: LossReduction::default(),
        }
    }
}

impl EdmLoss {
    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// Noise levels whose squares are outside the range of single precision, a `p_std` below 0, or a `sigma_data` that is not above 0.
    pub fn check(&self) -> Result<()> {
        let Self { p_mean, p_std, .. } = *self;
        let check = Checker("edm_loss");
        check.ensure(p_std.is_finite() && p_std >= 0.0, || {
            format!("p_std is {p_std:?}, expected a finite number of at least 0")
        })?;
        check.ensure(p_mean.abs() + RARE * p_std <= MOST_LOG, || {
            format!(
                "p_mean is {p_mean:?} with p_std {p_std:?}, expected |p_mean| + {RARE} p_std of at most {MOST_LOG}: noise levels are \
                 exp(p_mean + p_std n) for a normal n, and the loss divides by their squares"
            )
        })?;
        self.sigma_data.check()
    }

    /// Draws noise levels and noise from `generator`, one draw each, and computes the loss of samples `y` `[batch, channel, …]`. `batch`
    /// says which part of the global batch they are; `None` means all of it. `denoise` is given the noisy samples and the levels
    /// `[batch]`. All ranks call, with generators of equal state.
    ///
    /// # Errors
    ///
    /// As [`given`](Self::given); a part of the batch that does not fit.
    pub fn draw<A: Array>(
        &self,
        y: &A,
        generator: &Generator,
        batch: Option<BatchPart>,
        denoise: impl FnOnce(&A, &A) -> Result<A>,
    ) -> Result<A> {
        let options = (y.kind(), tch::Device::Cpu);
        self.check()?;
        let samples = y.extent(0)?;
        let levels = generator.normal(&window(&[samples], batch)?, self.p_mean, self.p_std, options)?;
        let sigma = y.constant(&levels)?.unary(Unary::Exp)?;
        let noise = normal(y, generator, batch)?;
        self.given(y, &noise, &sigma, denoise)
    }

    /// Computes the loss of samples `y` `[batch, channel, …]` with the given noise, standard normal and of that shape, and noise levels
    /// `sigma` `[batch]` or `[1]`.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes, a `sigma_data` that is not finite and above 0, or an operator or the denoiser fails.
    pub fn given<A: Array>(
        &self,
        y: &A,
        noise: &A,
        sigma: &A,
        denoise: impl FnOnce(&A, &A) -> Result<A>,
    ) -> Result<A> {
        let level = levels(y, sigma)?;
        let s = for_channels(&self.sigma_data.to_array(y)?, y)?;
        let noisy = y.add(&noise.mul(&level)?)?;
        let squares = denoise(&noisy, sigma)?.sub(y)?.unary(Unary::Square)?;
        let total = level.unary(Unary::Square)?.add(&s.unary(Unary::Square)?)?;
        let loss = squares.mul(&total.div(&level.mul(&s)?.unary(Unary::Square)?)?)?;
        Ok(match self.reduction {
            LossReduction::Mean => loss.mean()?,
            LossReduction::Sum => loss.sum()?,
            LossReduction::None => loss,
        })
    }
}
