//! Distance of energy spectra.

use isobar_array::{Array, Unary, periodic};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::{Loss, LossArray, Support, Weighting};
use crate::error::{Context, Error, Result};

/// Mean over samples and channels of 1/K Σ λₖ ln²((Eₖ(p) + ε) / (Eₖ(t) + ε)) over the wave numbers k = 1 … K, where Eₖ is the
/// energy of a field in the shell of wave number k ([`periodic::energy_spectrum`]), K half the number of points of the shortest
/// spatial dim with more than one, and λₖ proportional to k to the power of `exponent`, of mean one: the squared log-spectral
/// distance (Gray and Markel, "Distance measures for speech processing", 1976), of binned spectra as by Chakraborty et al., "Binned
/// spectral power loss for improved prediction of chaotic systems", 2025, whose ratios grow without bound where the logarithm does
/// not.
///
/// It compares amplitudes at each scale, not phases: use it beside another loss, which it keeps from blurring small scales. Fields
/// are taken as periodic. Masked points count as zero in both fields. Spectra are of normalised
/// fields; with `data.predict = "change"`, of the predicted field, not of its change.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Spectral {
    /// Exponent of the wave number in the weights of shells; 0 weights all alike. From -4 to 4.
    pub exponent: f64,
    /// Energy ε that is added to both spectra, in units of squared normalised values: shells with less hardly count. Above 0.
    pub epsilon: f64,
}

impl Default for Spectral {
    fn default() -> Self {
        Self { exponent: 0.0, epsilon: 1e-6 }
    }
}

impl Registered for Spectral {
    const NAME: &'static str = "spectral";
    const SUMMARY: &'static str =
        "Squared distance of the logarithms of the energy spectra of periodic fields.";
}

impl Loss for Spectral {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        Ok(self.errors(prediction, target)?.mean()?)
    }

    fn support(&self) -> Support {
        // A scaled difference from the target would not give the spectrum of the prediction.
        Support { unscaled: true, ..Support::CHANNELS }
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        let errors = self.errors(&weights.fill(prediction)?, &weights.fill(target)?)?;
        weights.mean_of_channels(&errors)
    }

    fn check(&self) -> Result<()> {
        if !(-4.0..=4.0).contains(&self.exponent) {
            let expected = "a number from -4 to 4";
            return Err(Error::setting("train.loss.exponent", self.exponent, expected, "0.0"));
        }
        match self.epsilon.is_finite() && self.epsilon > 0.0 {
            true => Ok(()),
            false => {
                Err(Error::setting("train.loss.epsilon", self.epsilon, "a finite number above 0", "1e-6"))
            }
        }
    }
}

impl Spectral {
    /// λₖ ln²((Eₖ(p) + ε) / (Eₖ(t) + ε)), `[sample, channel, shell]`.
    fn errors<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        let shape = target.shape();
        let dims: Vec<i64> = (2..shape.len() as i64).collect();
        let shells = shape.iter().skip(2).filter(|&&points| points > 1).min().map_or(0, |points| points / 2);
        if shells == 0 {
            let expected = "[sample, channel, spatial…] with two points or more along a spatial dim";
            return Err(Error::invalid(
                "the shape of fields for the loss spectral",
                format!("{shape:?}"),
                expected,
            ));
        }
        let energy = |field: &A| -> Result<A> {
            let spectrum = periodic::energy_spectrum(field, &dims)?;
            Ok(spectrum.narrow(-1, 1, shells)?.add_scalar(self.epsilon)?.unary(Unary::Log)?)
        };
        let errors = energy(prediction)?.sub(&energy(target)?)?.unary(Unary::Square)?;
        if self.exponent == 0.0 {
            return Ok(errors);
        }
        let weights: Vec<f64> = (1..=shells).map(|k| (k as f64).powf(self.exponent)).collect();
        let mean = weights.iter().sum::<f64>() / shells as f64;
        let weights: Vec<f64> = weights.iter().map(|weight| weight / mean).collect();
        let weights = Tensor::f_from_slice(&weights).and_then(|all| all.f_to_kind(plain(target.kind())));
        let weights = weights.context(|| "weights of wave numbers".to_owned())?;
        Ok(errors.mul(&errors.constant(&weights)?)?)
    }
}

/// Kind of a spectrum's energies.
fn plain(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

crate::register_loss!(Spectral);
