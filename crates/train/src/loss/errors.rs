//! Errors of fields `[sample, …]`, as validation reports them.

use isobar_array::{Array, Reduction, Unary, periodic};
use tch::{Kind, Tensor};

use super::missing::counted;
use super::relative_l2::relative;
use super::same_shape;
use crate::error::{Context, Error, Result};
use crate::variables::VariableError;

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
    let target = target.to_kind(Kind::Double)?;
    numbers(&relative(&prediction.to_kind(Kind::Double)?.sub(&target)?, &target)?)
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
    errors_over(prediction, target, None)
}

/// Returns [`variable_errors`] over the points that a boolean mask of the shape of the fields counts, true where they do. The
/// values of other points may be NaN. A channel without a point that counts has the error [`VariableError::MISSING`].
///
/// # Errors
///
/// Those of [`variable_errors`].
///
/// ```
/// use tch::Tensor;
///
/// let target = Tensor::from_slice(&[3.0, f64::NAN, 4.0]).view([1, 1, 3]);
/// let prediction = Tensor::from_slice(&[3.0, 7.0, 4.5]).view([1, 1, 3]);
/// let errors = isobar_train::loss::masked_variable_errors(&prediction, &target, &target.isfinite())?;
/// assert!((errors[0][0].relative - 0.1).abs() < 1e-12);
/// assert!((errors[0][0].rmse - 0.125_f64.sqrt()).abs() < 1e-12);
/// # Ok::<(), isobar_train::Error>(())
/// ```
pub fn masked_variable_errors<A: Array>(
    prediction: &A,
    target: &A,
    mask: &A,
) -> Result<Vec<Vec<VariableError>>> {
    errors_over(prediction, target, Some(mask))
}

/// Errors over all points, or those of a mask.
fn errors_over<A: Array>(prediction: &A, target: &A, mask: Option<&A>) -> Result<Vec<Vec<VariableError>>> {
    let _no_grad = tch::no_grad_guard();
    same_shape(prediction, target)?;
    let shape = target.shape();
    let &[_, channels, ref extents @ ..] = &shape[..] else { return Err(no_points(&shape)) };
    if extents.is_empty() {
        return Err(no_points(&shape));
    }
    let dims: Vec<i64> = (2..shape.len() as i64).collect();
    let norms = |x: &A| numbers(&x.reduce(Reduction::Norm, &dims, false)?);
    let (prediction, target) = match mask {
        None => (prediction.shallow_clone(), target.shallow_clone()),
        Some(mask) => counted(prediction, target, mask)?,
    };
    let target = target.to_kind(Kind::Double)?;
    let differences = norms(&prediction.to_kind(Kind::Double)?.sub(&target)?)?;
    let targets = norms(&target)?;
    let points = match mask {
        None => vec![extents.iter().product::<i64>() as f64; targets.len()],
        Some(mask) => numbers(&mask.to_kind(Kind::Double)?.reduce(Reduction::Sum, &dims, false)?)?,
    };
    let errors: Vec<VariableError> = differences
        .iter()
        .zip(targets.iter().zip(&points))
        .map(|(difference, (target, points))| match mask.is_some() && *points == 0.0 {
            true => VariableError::MISSING,
            // A zero field that is forecast exactly has no error.
            false => VariableError::new(
                if *difference == 0.0 { 0.0 } else { difference / target },
                difference / points.max(1.0).sqrt(),
            ),
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

/// Returns the elements of an array, row by row, on every rank.
pub(crate) fn numbers<A: Array>(array: &A) -> Result<Vec<f64>> {
    let whole =
        array.full_tensor()?.f_to_device(tch::Device::Cpu).and_then(|all: Tensor| all.f_reshape([-1]));
    whole.and_then(|all: Tensor| Vec::<f64>::try_from(all)).context(|| "reading errors".to_owned())
}
