//! Initial values of parameters.

use isobar_array::{Generator, Window};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// The values that a parameter starts with. Fans are of the global shape: `[out, in, kernel…]`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Init<A> {
    /// One number everywhere.
    Constant(f64),
    /// Uniform in [low, high).
    Uniform {
        /// The least value.
        low: f64,
        /// The end, not reached.
        high: f64,
    },
    /// Uniform in ±1/√fan, PyTorch's default for linear layers and convolutions, weights and biases.
    FanIn(i64),
    /// Uniform in ±√(6 / (fan in + fan out)): Glorot and Bengio, AISTATS 2010.
    XavierUniform,
    /// Normal.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        std: f64,
    },
    /// Normal of mean 0, cut at ±2, as PyTorch's `trunc_normal_` does.
    TruncNormal {
        /// The standard deviation before the cut.
        std: f64,
    },
    /// The exponential of a normal number.
    LogNormal {
        /// The mean of the logarithm.
        mean: f64,
        /// The standard deviation of the logarithm.
        std: f64,
    },
    /// Evenly spaced, in row-major order.
    Linspace {
        /// The first value.
        start: f64,
        /// The last value.
        end: f64,
    },
    /// These values: this rank's part.
    Given(A),
}

impl<A> Init<A> {
    /// Returns the initialisation with its given values as another kind of array.
    pub(super) fn with<B>(&self, f: impl FnOnce(&A) -> B) -> Init<B> {
        match *self {
            Self::Constant(value) => Init::Constant(value),
            Self::Uniform { low, high } => Init::Uniform { low, high },
            Self::FanIn(fan) => Init::FanIn(fan),
            Self::XavierUniform => Init::XavierUniform,
            Self::Normal { mean, std } => Init::Normal { mean, std },
            Self::TruncNormal { std } => Init::TruncNormal { std },
            Self::LogNormal { mean, std } => Init::LogNormal { mean, std },
            Self::Linspace { start, end } => Init::Linspace { start, end },
            Self::Given(ref values) => Init::Given(f(values)),
        }
    }
}

impl Init<Tensor> {
    /// The values of the part `window`.
    pub(super) fn values(
        &self,
        generator: &Generator,
        window: &Window,
        options: (Kind, Device),
    ) -> Result<Tensor> {
        let uniform = |bound: f64| Ok(generator.uniform(window, -bound, bound, options)?);

        match *self {
            Init::Constant(value) => {
                let shape = window.shape();
                Tensor::f_full(shape, value, options).map_err(|source| refused("full", shape, source))
            }
            Init::Uniform { low, high } => Ok(generator.uniform(window, low, high, options)?),
            Init::FanIn(fan) => uniform((fan as f64).sqrt().recip()),
            Init::XavierUniform => {
                let (fan_in, fan_out) = fans(window.global())?;
                uniform((6.0 / (fan_in + fan_out) as f64).sqrt())
            }
            Init::Normal { mean, std } => Ok(generator.normal(window, mean, std, options)?),
            Init::TruncNormal { std } => {
                Ok(generator.trunc_normal(window, (0.0, std), (-2.0, 2.0), options)?)
            }
            Init::LogNormal { mean, std } => {
                let normal = generator.normal(window, mean, std, options)?;
                normal.f_exp().map_err(|source| refused("exp", window.shape(), source))
            }
            Init::Linspace { start, end } => {
                let values = || {
                    let count = window.global().iter().product::<i64>();
                    let whole = Tensor::f_linspace(start, end, count, (Kind::Double, options.1))?;
                    let mut part = whole.f_reshape(window.global())?;
                    for (dim, (&offset, &extent)) in window.offset().iter().zip(window.shape()).enumerate() {
                        part = part.f_narrow(dim as i64, offset, extent)?;
                    }
                    part.f_to_kind(options.0)?.f_contiguous()
                };
                values().map_err(|source| refused("linspace", window.shape(), source))
            }
            Init::Given(ref values) => {
                let shape = window.shape();
                if values.size() != shape {
                    let reason = format!("values of shape {:?} for a part of {shape:?}", values.size());
                    return Err(Error::from(isobar_array::Error::Argument { op: "init", reason }));
                }
                let copy = values.f_detach().and_then(|v| v.f_to_device_(options.1, options.0, false, true));
                copy.map_err(|source| refused("copy", shape, source))
            }
        }
    }
}

fn fans(shape: &[i64]) -> Result<(i64, i64)> {
    let [out, input, kernel @ ..] = shape else {
        let reason = format!("a shape of two dims or more is needed, not {shape:?}");
        return Err(Error::from(isobar_array::Error::Argument { op: "xavier_uniform", reason }));
    };
    let area: i64 = kernel.iter().product();
    Ok((input * area, out * area))
}

fn refused(op: &'static str, shape: &[i64], source: tch::TchError) -> Error {
    Error::from(isobar_array::Error::Operator { op, shapes: format!("{shape:?}"), source })
}
