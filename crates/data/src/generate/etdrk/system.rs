//! Equations on a periodic box.

use std::fmt;
use std::ops::RangeInclusive;

use tch::{Kind, Tensor};

use super::initial::Initial;
use super::spectrum::{Domain, Spectrum};
use crate::{Error, Result};

/// An equation u_t = L u + N(u) on a periodic box with a linear part L of constant coefficients, for
/// `isobar data make NAME`.
///
/// Its name and its keys, which `--set system.KEY=VALUE` sets, are those of [`Registered`](isobar_registry::Registered); [`register_system!`](crate::register_system) makes it
/// known to every program that is linked with the crate it stands in. Numbers among its keys become parameters of the file.
///
/// ```
/// use isobar_data::generate::etdrk::{Defaults, Domain, Solver, Spectrum, System};
/// use isobar_data::Result;
/// use isobar_registry::Registered;
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
/// use tch::Tensor;
///
/// /// u_t = -rate u
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields, default)]
/// struct Decay {
///     /// Rate of the decay.
///     rate: f64,
/// }
///
/// impl Default for Decay {
///     fn default() -> Self {
///         Self { rate: 1.0 }
///     }
/// }
///
/// impl Registered for Decay {
///     const NAME: &'static str = "decay";
///     const SUMMARY: &'static str = "u_t = -rate u.";
/// }
///
/// impl System for Decay {
///     fn defaults(&self) -> Defaults {
///         Defaults::default()
///     }
///     fn linear(&self, spectrum: &Spectrum) -> Result<Tensor> {
///         Ok(spectrum.laplacian()?.f_zeros_like()?.f_sub_scalar(self.rate)?)
///     }
/// }
///
/// isobar_data::register_system!(Decay);
///
/// let domain = Domain { dims: 2, points: 4, length: 1.0 };
/// let solver = Solver::new(&Decay::default().into(), domain, 1.0, 4)?;
/// let later = solver.solve(&Tensor::from_slice(&[1.0; 16]).view([1, 1, 4, 4]), 1)?;
/// assert!((later.double_value(&[0, 0, 0, 0]) - (-1.0_f64).exp()).abs() < 1e-15);
/// # Ok::<(), isobar_data::Error>(())
/// ```
pub trait System: fmt::Debug + Send + Sync {
    /// Numbers of dims in which the equation exists.
    fn dims(&self) -> RangeInclusive<usize> {
        1..=3
    }

    /// Domain and times where a user sets none.
    fn defaults(&self) -> Defaults;

    /// Names of its fields, with their tensor order: 0 for a scalar, 1 for a vector, whose components are as many channels.
    fn fields(&self) -> Vec<(&'static str, usize)> {
        vec![("u", 0)]
    }

    /// Checks settings against a domain.
    ///
    /// # Errors
    /// A setting out of its range; the error says how to mend it.
    fn check_settings(&self, _domain: &Domain) -> Result<()> {
        Ok(())
    }

    /// The linear part as factors of the coefficients, real or complex: `[kx, …]` for all channels, or `[channel, kx, …]`.
    ///
    /// # Errors
    /// Memory that cannot be allocated.
    fn linear(&self, spectrum: &Spectrum) -> Result<Tensor>;

    /// Largest number of fields in a product of the nonlinear part: 2 for u u_x. 0 without one.
    fn degree(&self) -> usize {
        0
    }

    /// The coefficients of N(u), `[sample, channel, kx, …]`, from those of u, which are free of what would be aliased.
    ///
    /// # Errors
    /// Memory that cannot be allocated.
    fn nonlinear(&self, _spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        Ok(hat.f_zeros_like()?)
    }

    /// Initial fields where a user sets none.
    fn initial(&self) -> Initial {
        Initial::default()
    }

    /// Number of random fields that an initial state is made from; by default one for each channel.
    fn draws(&self, dims: usize) -> usize {
        self.fields().iter().map(|&(_, order)| dims.pow(order as u32)).sum()
    }

    /// Makes an initial state `[channel, x, …]` from random fields `[draw, x, …]`; by default these are the state.
    ///
    /// # Errors
    /// Memory that cannot be allocated.
    fn start(&self, random: Tensor) -> Result<Tensor> {
        Ok(random)
    }
}

impl dyn System {
    /// Checks that the equation exists on a domain, and its settings.
    ///
    /// # Errors
    /// Another number of dims, or a setting out of its range.
    pub fn check(&self, domain: &Domain) -> Result<()> {
        let dims = self.dims();
        if !dims.contains(&domain.dims) {
            let expected = match (dims.start(), dims.end()) {
                (first, last) if first == last => first.to_string(),
                (first, last) => format!("{first} to {last}"),
            };
            return Err(Error::Invalid(format!(
                "dims is {}, but this system exists in {expected} dims; --set dims={}",
                domain.dims,
                dims.start()
            )));
        }
        self.check_settings(domain)
    }

    /// Number of channels of a state.
    pub fn channels(&self, dims: usize) -> usize {
        self.fields().iter().map(|&(_, order)| dims.pow(order as u32)).sum()
    }
}

/// Domain and times of a system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// Number of dims.
    pub dims: usize,
    /// Length of each side of the box.
    pub length: f64,
    /// Time between frames.
    pub dt: f64,
    /// Time steps of the solver between frames.
    pub substeps: usize,
    /// Frames before the first one that is stored.
    pub warm_up: usize,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { dims: 1, length: 1.0, dt: 0.1, substeps: 1, warm_up: 0 }
    }
}

/// Rejects a number that is not finite, or not at least `least`.
pub(super) fn at_least(key: &str, value: f64, least: f64) -> Result<()> {
    if value.is_finite() && value >= least {
        return Ok(());
    }
    let expected = if least == f64::MIN {
        "a finite number".to_owned()
    } else {
        format!("a finite number from {least} on")
    };
    Err(Error::Invalid(format!(
        "system.{key} is {value}, expected {expected}; --set system.{key}={:?}",
        least.max(1.0)
    )))
}

/// Rejects a number that is not finite.
pub(super) fn finite(key: &str, value: f64) -> Result<()> {
    at_least(key, value, f64::MIN)
}

/// Real factors as complex ones.
pub(super) fn complex(factors: &Tensor) -> Result<Tensor> {
    Ok(factors.f_to_kind(Kind::ComplexDouble)?)
}
