//! Scaling of a network's input and output by the noise level.

use isobar_array::{Array, Unary};
use isobar_shard::{Init, Params, Placement};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::{Checker, Error, Result};
use crate::layers::constant;

const MODEL: &str = "edm_preconditioning";

/// Standard deviation of the data: one number, or one for each channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a number, or a list of one for each channel")]
pub enum SigmaData {
    /// One number for all channels.
    All(f64),
    /// A number for each channel; a list of one number is for all.
    Each(Vec<f64>),
}

impl Default for SigmaData {
    fn default() -> Self {
        Self::All(0.5)
    }
}

/// A denoiser's data, and the noise levels that it accepts.
///
/// ```
/// use isobar_models::{Denoiser, SigmaData};
///
/// let any = Denoiser::from(SigmaData::All(0.5));
/// assert_eq!((any.sigma_min, any.sigma_max), (0.0, f64::INFINITY));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Denoiser {
    /// Standard deviation of the data.
    pub sigma_data: SigmaData,
    /// Lowest noise level. Samplers start and end within the levels.
    pub sigma_min: f64,
    /// Highest noise level.
    pub sigma_max: f64,
}

impl From<SigmaData> for Denoiser {
    /// A denoiser for all noise levels.
    fn from(sigma_data: SigmaData) -> Self {
        Self { sigma_data, sigma_min: 0.0, sigma_max: f64::INFINITY }
    }
}

impl SigmaData {
    /// Checks that the numbers are finite and above 0.
    pub(crate) fn check(&self) -> Result<()> {
        let values = self.values();
        let fits = !values.is_empty() && values.iter().all(|s| s.is_finite() && *s > 0.0);
        Checker(MODEL)
            .ensure(fits, || format!("sigma_data is {values:?}, expected one or more finite numbers above 0"))
    }

    fn values(&self) -> &[f64] {
        match self {
            Self::All(value) => std::slice::from_ref(value),
            Self::Each(values) => values,
        }
    }

    fn shape(&self) -> Vec<i64> {
        match self {
            Self::All(_) => Vec::new(),
            // One number is that of all channels, as in PhysicsNeMo.
            Self::Each(values) if values.len() == 1 => Vec::new(),
            Self::Each(values) => vec![values.len() as i64],
        }
    }

    /// The numbers beside an array.
    pub(super) fn to_array<A: Array>(&self, like: &A) -> Result<A> {
        self.check()?;
        constant(self.values(), &self.shape(), like)
    }
}

/// The preconditioning of a denoiser D by a network F:
///
/// ```text
/// D(x, σ) = c_skip x + c_out F(c_in x, ln σ / 4)
/// c_skip = s² / (σ² + s²)     c_out = σ s / √(σ² + s²)     c_in = 1 / √(σ² + s²)
/// ```
///
/// with the standard deviation s of the data, one number or one for each channel. Table 1 of Karras et al., arXiv:2206.00364. s is the
/// buffer `sigma_data` `[]` or `[channel]` of a state dict.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::{EdmPreconditioning, SigmaData};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let edm = EdmPreconditioning::new(&SigmaData::All(0.5), &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::ones([2, 3, 4, 4], (Kind::Float, Device::Cpu));
/// let sigma = Tensor::from_slice(&[0.5f32, 0.5]);
/// // With a network that gives 0, half of the input remains where noise and data are equally large.
/// let y = edm.denoise(&x, &sigma, |x, _| Ok(x.zeros_like()))?;
/// assert!((y - x * 0.5).abs().max().double_value(&[]) < 1e-6);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct EdmPreconditioning<A = Tensor> {
    sigma_data: A,
}

impl<A: Array> EdmPreconditioning<A> {
    /// Makes the preconditioning with the buffer `sigma_data`.
    ///
    /// # Errors
    ///
    /// Numbers that are not finite and above 0, or a buffer that `params` refuses.
    pub fn new(sigma_data: &SigmaData, params: &mut impl Params<Array = A>) -> Result<Self> {
        const NAME: &str = "sigma_data";
        sigma_data.check()?;
        let shape = sigma_data.shape();
        let start = match sigma_data {
            SigmaData::All(value) => Init::Constant(*value),
            SigmaData::Each(values) => {
                let like = params.draw(NAME, &shape, &Init::Constant(0.0), Placement::Replicate)?;
                Init::Given(constant(values, &shape, &like)?)
            }
        };
        Ok(Self { sigma_data: params.buffer(NAME, &shape, start, Placement::Replicate)? })
    }

    /// Makes the preconditioning of `x` without a buffer.
    pub(crate) fn without_buffer(sigma_data: &SigmaData, x: &A) -> Result<Self> {
        Ok(Self { sigma_data: sigma_data.to_array(x)? })
    }

    /// Computes D(x, σ) for `x` `[batch, channel, …]` and noise levels `[batch]`, `[1]` or `[batch, 1, …]`. `network` is given c_in x
    /// and ln σ / 4 `[batch]`.
    ///
    /// # Errors
    ///
    /// Noise levels of another shape, other channels than those of `sigma_data`, or an operator or the network fails.
    pub fn denoise(&self, x: &A, sigma: &A, network: impl FnOnce(&A, &A) -> Result<A>) -> Result<A> {
        let sigma = levels(x, sigma)?;
        let s = for_channels(&self.sigma_data, x)?;
        let s2 = s.unary(Unary::Square)?;
        let c_in = sigma.unary(Unary::Square)?.add(&s2)?.unary(Unary::Rsqrt)?;
        let c_skip = s2.mul(&c_in.unary(Unary::Square)?)?;
        let c_out = sigma.mul(&s)?.mul(&c_in)?;
        let batch = x.extent(0)?;
        let c_noise = sigma.unary(Unary::Log)?.mul_scalar(0.25)?.reshape(&[sigma.extent(0)?])?;
        let y = network(&x.mul(&c_in)?, &c_noise.expand(&[batch])?)?;
        Ok(x.mul(&c_skip)?.add(&y.mul(&c_out)?)?)
    }
}

/// Noise levels as `[batch, 1, …]` or `[1, 1, …]`, with as many dims as `x`.
pub(super) fn levels<A: Array>(x: &A, sigma: &A) -> Result<A> {
    let (shape, got) = (x.shape(), sigma.shape());
    let count: i64 = got.iter().product();
    let fits = shape.len() >= 2 && (count == shape[0] || count == 1);
    if !fits || got.iter().skip(1).any(|&extent| extent != 1) {
        let batch = shape.first().copied().unwrap_or(0);
        return Err(Error::Input {
            model: MODEL,
            got,
            want: format!("[{batch}] or [1] for the noise levels"),
        });
    }
    let mut each = vec![1; shape.len()];
    each[0] = count;
    Ok(sigma.reshape(&each)?)
}

/// `sigma_data` with as many dims as `x`.
pub(super) fn for_channels<A: Array>(sigma_data: &A, x: &A) -> Result<A> {
    let shape = x.shape();
    let mut each = vec![1; shape.len()];
    if let Some(&channels) = sigma_data.shape().first() {
        if shape[1] != channels {
            let want = format!("{channels} channels, as many as sigma_data has numbers");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        each[1] = channels;
    }
    Ok(sigma_data.reshape(&each)?)
}
