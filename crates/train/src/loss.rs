//! Losses and errors of fields `[sample, …]`.

use isobar_array::{Array, Reduction, Unary, periodic};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Context, Error, Result};
use crate::variables::VariableError;

/// Training losses; both are means over samples, so that ranks' losses can be weighted by their sample counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Mean squared error.
    Mse,
    /// Mean over samples of ‖p − t‖ / ‖t‖.
    #[default]
    RelativeL2,
}

impl Loss {
    /// The loss of predictions, `[sample, …]`, against targets of the same shape: a scalar on the graph of both. Of sharded
    /// fields all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// The shapes differ, or an exchange fails.
    pub fn of<A: Array>(self, prediction: &A, target: &A) -> Result<A> {
        same_shape(prediction, target)?;
        Ok(match self {
            Self::Mse => prediction.mse_loss(target)?,
            Self::RelativeL2 => relative_l2(prediction, target)?.mean()?,
        })
    }
}

/// ‖p − t‖ / ‖t‖ of each sample, in float64. The error of a prediction on a data set is the mean of these over all
/// samples, taken on physical values; a target of zero gives infinity. Of sharded fields all ranks of their mesh call, and
/// each has the errors of all samples.
///
/// # Errors
///
/// The shapes differ, or an exchange fails.
///
/// ```
/// use tch::Tensor;
///
/// let target = Tensor::f_from_slice(&[3.0f32, 4.0, 1.0, 0.0])?.f_view([2, 2])?;
/// let prediction = Tensor::f_from_slice(&[3.0f32, 4.5, 0.0, 0.0])?.f_view([2, 2])?;
/// assert_eq!(isobar_train::loss::relative_l2_errors(&prediction, &target)?, [0.1, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn relative_l2_errors<A: Array>(prediction: &A, target: &A) -> Result<Vec<f64>> {
    let _no_grad = tch::no_grad_guard();
    same_shape(prediction, target)?;
    numbers(&relative_l2(&prediction.to_kind(Kind::Double)?, &target.to_kind(Kind::Double)?)?)
}

/// Returns the errors of each sample of `[sample, channel, spatial…]` per channel (variable), in float64: ‖p
/// − t‖ / ‖t‖ over its points, and the root mean square error in its unit. A target of zero gives an infinite
/// relative error. For sharded fields all ranks of the mesh call, and each gets the errors of all samples,
/// bitwise the same.
///
/// # Errors
///
/// The shapes differ or have no spatial dim, or an exchange fails.
///
/// ```
/// use tch::Tensor;
///
/// // One sample of two variables on two points.
/// let target = Tensor::f_from_slice(&[3000.0f32, 4000.0, 1.0, 0.0])?.f_view([1, 2, 2])?;
/// let prediction = Tensor::f_from_slice(&[3000.0f32, 4000.5, 0.0, 0.0])?.f_view([1, 2, 2])?;
/// let errors = isobar_train::loss::variable_errors(&prediction, &target)?;
/// assert_eq!(errors[0].iter().map(|error| error.relative).collect::<Vec<_>>(), [0.0001, 1.0]);
/// assert!((errors[0][1].rmse - 0.5f64.sqrt()).abs() < 1e-12);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn variable_errors<A: Array>(prediction: &A, target: &A) -> Result<Vec<Vec<VariableError>>> {
    let _no_grad = tch::no_grad_guard();
    same_shape(prediction, target)?;
    let shape = target.shape();
    let &[_, channels, ref extents @ ..] = &shape[..] else { return Err(no_points(&shape)) };
    if extents.is_empty() {
        return Err(no_points(&shape));
    }
    let dims: Vec<i64> = (2..shape.len() as i64).collect();
    let norms = |x: &A| numbers(&x.reduce(Reduction::Norm, &dims, false)?);
    let target = target.to_kind(Kind::Double)?;
    let differences = norms(&prediction.to_kind(Kind::Double)?.sub(&target)?)?;
    let targets = norms(&target)?;
    let points = extents.iter().product::<i64>() as f64;
    let errors: Vec<VariableError> = differences
        .iter()
        .zip(&targets)
        .map(|(difference, target)| VariableError {
            // A zero field that is forecast exactly has no error.
            relative: if *difference == 0.0 { 0.0 } else { difference / target },
            rmse: difference / points.sqrt(),
        })
        .collect();
    Ok(errors.chunks(channels.max(1) as usize).map(<[VariableError]>::to_vec).collect())
}

fn no_points(shape: &[i64]) -> Error {
    Error::invalid("the shape of a forecast", format!("{shape:?}"), "[sample, channel, spatial…]")
}

/// Σ |E(p) − E(t)| / Σ E(t) of each sample of `[sample, channel, spatial…]` and of each of its channels, where E are the
/// [energy spectra](periodic::energy_spectrum) of the fields along their spatial dims, in float64. Of sharded fields all ranks
/// of their mesh call, and each has the errors of all samples. A target of zero gives an infinite error.
///
/// # Errors
///
/// The shapes differ, or an exchange fails.
///
/// ```
/// use isobar_train::loss::spectrum_errors;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
/// let wave = x.sin().view([1, 1, 16]);
/// // Moved along, a wave has the same spectrum; of twice the height it has four times the energy.
/// assert!(spectrum_errors(&wave.roll([3], [2]), &wave)?[0][0] < 1e-12);
/// assert!((spectrum_errors(&(&wave * 2.0), &wave)?[0][0] - 3.0).abs() < 1e-12);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn spectrum_errors<A: Array>(prediction: &A, target: &A) -> Result<Vec<Vec<f64>>> {
    let _no_grad = tch::no_grad_guard();
    same_shape(prediction, target)?;
    let dims: Vec<i64> = (2..prediction.shape().len() as i64).collect();
    let spectrum = |field: &A| periodic::energy_spectrum(&field.to_kind(Kind::Double)?, &dims);
    let (of_prediction, of_target) = (spectrum(prediction)?, spectrum(target)?);
    let sum = |x: &A| x.reduce(Reduction::Sum, &[-1], false);
    let differences = numbers(&sum(&of_prediction.sub(&of_target)?.unary(Unary::Abs)?)?)?;
    let targets = numbers(&sum(&of_target)?)?;
    let errors: Vec<f64> = differences
        .iter()
        .zip(&targets)
        .map(|(difference, target)| if *difference == 0.0 { 0.0 } else { difference / target })
        .collect();
    let channels = prediction.shape().get(1).map_or(1, |&channels| channels.max(1) as usize);
    Ok(errors.chunks(channels).map(<[f64]>::to_vec).collect())
}

fn relative_l2<A: Array>(prediction: &A, target: &A) -> isobar_array::Result<A> {
    let dims: Vec<i64> = (1..prediction.shape().len() as i64).collect();
    let norm = |x: &A| x.reduce(Reduction::Norm, &dims, false);
    norm(&prediction.sub(target)?)?.div(&norm(target)?)
}

/// Returns the elements of an array, row by row, on every rank.
fn numbers<A: Array>(array: &A) -> Result<Vec<f64>> {
    let whole = array.whole()?.f_to_device(tch::Device::Cpu).and_then(|all: Tensor| all.f_reshape([-1]));
    whole.and_then(|all: Tensor| Vec::<f64>::try_from(all)).context(|| "reading errors".to_owned())
}

fn same_shape<A: Array>(prediction: &A, target: &A) -> Result<()> {
    let (found, expected) = (prediction.shape(), target.shape());
    if found == expected && found.len() > 1 {
        return Ok(());
    }
    Err(Error::invalid(
        "the shape of the prediction",
        format!("{found:?}"),
        format!("that of the target, {expected:?}, a sample in each row"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_follow_their_definitions() {
        let target = Tensor::from_slice(&[3.0, 4.0, 0.0, 2.0]).view([2, 2]);
        let prediction = Tensor::from_slice(&[3.0, 3.0, 0.0, 1.0]).view([2, 2]);
        assert_eq!(Loss::Mse.of(&prediction, &target).unwrap().double_value(&[]), 0.5);
        let relative = Loss::RelativeL2.of(&prediction, &target).unwrap().double_value(&[]);
        assert!((relative - 0.35).abs() < 1e-15);
    }

    #[test]
    fn a_perfect_prediction_has_a_gradient() {
        let x = Tensor::from_slice(&[3.0, 4.0]).view([1, 2]).set_requires_grad(true);
        Loss::RelativeL2.of(&x, &x.detach()).unwrap().backward();
        assert_eq!(Vec::<f64>::try_from(x.grad().view(-1)).unwrap(), [0.0, 0.0]);
    }

    #[test]
    fn shapes_must_agree() {
        let [a, b] = [[2, 3], [2, 4]].map(|shape| Tensor::zeros(shape, (Kind::Float, tch::Device::Cpu)));
        let error = Loss::Mse.of(&a, &b).unwrap_err().to_string();
        insta::assert_snapshot!(error, @"the shape of the prediction is [2, 3], expected that of the target, [2, 4], a sample in each row");
    }
}
