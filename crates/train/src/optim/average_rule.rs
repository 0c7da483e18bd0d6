//! Update rules of parameter averages.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Update rule of an average of parameters: after step t (from 1), average ← d · average + (1 − d) · parameter, with d = 0 in the first
/// step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AverageRule {
    /// d = min(decay, (1 + t) / (10 + t)), with a decay in [0, 1): an exponential average, of the last 1 / (1 − decay) steps.
    Decay(f64),
    /// d = (1 − 1/t)^(γ + 1): the weight of step τ is proportional to τ^γ. The width, above 0 and at most 1/√12, is the standard deviation
    /// of that profile relative to t; the average gets longer with the run (Karras et al., arXiv:2312.02696, section 3.1).
    Width(f64),
}

/// The largest width: that of γ = 0, the mean of all steps.
const WIDEST: f64 = 0.288_675_134_594_812_9;

impl AverageRule {
    /// # Errors
    ///
    /// A decay or width out of its range.
    pub(super) fn check(self) -> Result<()> {
        match self {
            Self::Decay(decay) if !(0.0..1.0).contains(&decay) => {
                Err(Error::invalid("the decay of averaged parameters", decay, "a number in [0, 1)"))
            }
            Self::Width(width) => exponent(width).map(drop),
            Self::Decay(_) => Ok(()),
        }
    }

    /// Returns d of the step `t`.
    pub(crate) fn kept(self, t: u64) -> f64 {
        let steps = t as f64;
        match self {
            _ if t <= 1 => 0.0,
            Self::Decay(decay) => decay.min((1.0 + steps) / (10.0 + steps)),
            Self::Width(width) => {
                exponent(width).map_or(0.0, |exponent| (1.0 - 1.0 / steps).powf(exponent + 1.0))
            }
        }
    }

    /// Returns true if an average of rule `saved` can continue under this rule. Decays may change, widths may not.
    pub(crate) fn continues(self, saved: Self) -> bool {
        matches!((self, saved), (Self::Decay(_), Self::Decay(_))) || self == saved
    }
}

/// Returns γ of a width σ, by σ² (γ + 2)² (γ + 3) = γ + 1.
///
/// # Errors
///
/// A width that is not above 0, or is larger than that of γ = 0.
pub(crate) fn exponent(width: f64) -> Result<f64> {
    const STEPS: usize = 200;
    let (mut low, mut high) = (0.0, 1e9);
    let of = |exponent: f64| (exponent + 1.0).sqrt() / ((exponent + 2.0) * (exponent + 3.0).sqrt());
    if !(width > of(high) && width <= WIDEST) {
        return Err(Error::invalid("the width of an average", width, "a number above 0, and at most 0.2886"));
    }
    // The width falls as the exponent grows.
    for _ in 0..STEPS {
        let middle = 0.5 * (low + high);
        if of(middle) > width { low = middle } else { high = middle }
    }
    Ok(0.5 * (low + high))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exponents of section 3.1 of the paper: widths of 0.05 and 0.10.
    #[test]
    fn widths_have_the_exponents_of_the_paper() {
        assert!((exponent(0.05).unwrap() - 16.97).abs() < 5e-3);
        assert!((exponent(0.10).unwrap() - 6.94).abs() < 5e-3);
        assert!(exponent(WIDEST).unwrap() < 1e-6);
        for width in [0.0, -0.1, 0.3, f64::NAN, 1e-12] {
            assert!(exponent(width).is_err(), "{width}");
        }
    }
}
