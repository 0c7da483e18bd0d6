//! Continuous ranked probability score of ensembles.

use std::sync::Once;

use isobar_array::{Array, Reduction, Unary};
use isobar_registry::Registered;
use serde::{Deserialize, Serialize};

use super::{Loss, LossArray, Support, Weighting, is_ensemble};
use crate::error::{Error, Result};

/// Mean over all elements of the continuous ranked probability score of an ensemble, `[sample, member, channel, spatial…]`, against
/// targets `[sample, channel, spatial…]`: see [`crps`]. For a single prediction of the shape of the targets it is the mean absolute
/// error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Crps {
    /// Uses the fair estimator, whose expectation does not depend on the number of members; false for the biased one, of the
    /// ensemble as a distribution.
    pub fair: bool,
}

impl Default for Crps {
    fn default() -> Self {
        Self { fair: true }
    }
}

impl Registered for Crps {
    const NAME: &'static str = "crps";
    const SUMMARY: &'static str = "Continuous ranked probability score of an ensemble.";
}

impl Loss for Crps {
    fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        Ok(self.errors(prediction, target)?.mean()?)
    }

    fn support(&self) -> Support {
        Support { members: true, ..Support::WEIGHTS }
    }

    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        let filled = match is_ensemble(prediction, target) {
            true => each_member(prediction, |member| weights.fill(member))?,
            false => weights.fill(prediction)?,
        };
        weights.mean(&self.errors(&filled, &weights.fill(target)?)?)
    }
}

impl Crps {
    fn errors<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
        match is_ensemble(prediction, target) {
            true => crps(prediction, target, self.fair),
            false => {
                warn_of_single();
                Ok(prediction.sub(target)?.unary(Unary::Abs)?)
            }
        }
    }
}

/// Warns once in a process of predictions without members. The shape of a prediction is not known before the loss: a model does not
/// declare that it returns an ensemble.
fn warn_of_single() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            "train.loss = \"crps\" and the model returns no ensemble [sample, member, channel, spatial…]: the loss is the mean absolute \
             error, as with --set train.loss=mae, and the metric spread is 0"
        );
    });
}

/// Computes the continuous ranked probability score of each element of an ensemble x, `[sample, member, …]` with M members, against
/// targets y, `[sample, …]`: 1/M Σᵢ |xᵢ − y| − 1/(2M²) Σᵢⱼ |xᵢ − xⱼ|, or, with `fair`, with M(M − 1) in place of M² (Ferro,
/// "Fair scores for ensemble forecasts", 2014). Of shape `[sample, …]`, in the unit of the fields; of one member it is |x − y|. The
/// members must not be sharded. Communicates nothing. It takes M/2 passes over the ensemble.
///
/// # Errors
///
/// Shapes that do not fit.
///
/// ```
/// use tch::Tensor;
///
/// let ensemble = Tensor::from_slice(&[1.0, 3.0]).view([1, 2, 1]);
/// let target = Tensor::from_slice(&[0.0]).view([1, 1]);
/// let score = |fair| isobar_train::loss::crps(&ensemble, &target, fair).map(|score| score.double_value(&[0, 0]));
/// assert_eq!(score(false)?, 2.0 - 0.5);
/// assert_eq!(score(true)?, 2.0 - 1.0);
/// # Ok::<(), isobar_train::Error>(())
/// ```
pub fn crps<A: Array>(ensemble: &A, target: &A, fair: bool) -> Result<A> {
    check(ensemble, target)?;
    let members = ensemble.extent(1)?;
    let errors = ensemble.sub(&target.unsqueeze(1)?)?.unary(Unary::Abs)?;
    let error = errors.reduce(Reduction::Mean, &[1], false)?;
    if members == 1 {
        return Ok(error);
    }
    // Σᵢⱼ: members against those `shift` places on, around the ensemble. A shift and its complement have the same sum.
    let mut spread: Option<A> = None;
    for shift in 1..=members / 2 {
        let others = ensemble.roll(&[shift], &[1])?;
        let apart = ensemble.sub(&others)?.unary(Unary::Abs)?.reduce(Reduction::Sum, &[1], false)?;
        let apart = if 2 * shift == members { apart } else { apart.mul_scalar(2.0)? };
        spread = Some(match spread {
            None => apart,
            Some(spread) => spread.add(&apart)?,
        });
    }
    let pairs = members * if fair { members - 1 } else { members };
    match spread {
        None => Ok(error),
        Some(spread) => Ok(error.sub(&spread.mul_scalar(0.5 / pairs as f64)?)?),
    }
}

/// Computes the mean over the members of an ensemble, `[sample, member, …]`: `[sample, …]`. Communicates nothing.
///
/// # Errors
///
/// An array of one dim.
///
/// ```
/// use isobar_train::loss::ensemble_mean;
/// use tch::Tensor;
///
/// // One sample of two members with two values each.
/// let ensemble = Tensor::from_slice(&[1.0, 10.0, 3.0, 30.0]).view([1, 2, 2]);
/// assert_eq!(ensemble_mean(&ensemble)?, Tensor::from_slice2(&[[2.0, 20.0]]));
/// # Ok::<(), isobar_train::Error>(())
/// ```
pub fn ensemble_mean<A: Array>(ensemble: &A) -> Result<A> {
    Ok(ensemble.reduce(Reduction::Mean, &[1], false)?)
}

/// Computes the unbiased variance over the members of an ensemble, `[sample, member, …]`: `[sample, …]`, with M − 1 in the
/// denominator; 0 for one member. Communicates nothing.
///
/// # Errors
///
/// An array of one dim.
///
/// ```
/// use isobar_train::loss::ensemble_variance;
/// use tch::Tensor;
///
/// let ensemble = Tensor::from_slice(&[1.0, 10.0, 3.0, 30.0]).view([1, 2, 2]);
/// assert_eq!(ensemble_variance(&ensemble)?, Tensor::from_slice2(&[[2.0, 200.0]]));
/// # Ok::<(), isobar_train::Error>(())
/// ```
pub fn ensemble_variance<A: Array>(ensemble: &A) -> Result<A> {
    let members = ensemble.extent(1)?;
    let mean = ensemble.reduce(Reduction::Mean, &[1], true)?;
    let squares = ensemble.sub(&mean)?.unary(Unary::Square)?.reduce(Reduction::Sum, &[1], false)?;
    Ok(squares.mul_scalar(1.0 / (members - 1).max(1) as f64)?)
}

/// Changes each member of an ensemble by itself.
fn each_member<A: Array>(ensemble: &A, change: impl Fn(&A) -> Result<A>) -> Result<A> {
    let members = (0..ensemble.extent(1)?).map(|member| change(&ensemble.select(1, member)?));
    let members = members.collect::<Result<Vec<A>>>()?;
    Ok(A::stack(&members.iter().collect::<Vec<_>>(), 1)?)
}

fn check<A: Array>(ensemble: &A, target: &A) -> Result<()> {
    match is_ensemble(ensemble, target) {
        true => Ok(()),
        false => Err(Error::invalid(
            "the shape of an ensemble",
            format!("{:?}", ensemble.shape()),
            format!("[sample, member, …] for targets {:?}", target.shape()),
        )),
    }
}

crate::register_loss!(Crps);
