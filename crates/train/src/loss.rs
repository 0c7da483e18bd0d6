//! Losses and errors of fields `[sample, …]`.

use serde::{Deserialize, Serialize};
use tch::{Kind, TchError, Tensor};

use crate::error::{Context, Error, Result};

/// What training minimises; both are means over samples, so that ranks' losses can be weighted by their sample counts.
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
    /// The loss of predictions, `[sample, …]`, against targets of the same shape: a scalar on the graph of both.
    ///
    /// # Errors
    ///
    /// Where the shapes differ.
    pub fn of(self, prediction: &Tensor, target: &Tensor) -> Result<Tensor> {
        same_shape(prediction, target)?;
        match self {
            Self::Mse => prediction.f_sub(target).and_then(|d| d.f_square()?.f_mean(None)),
            Self::RelativeL2 => relative_l2(prediction, target).and_then(|errors| errors.f_mean(None)),
        }
        .context(|| "the loss".to_owned())
    }
}

/// ‖p − t‖ / ‖t‖ of each sample, in float64. The error of a prediction on a data set is the mean of these over all
/// samples, taken on physical values; a target of zero gives infinity.
///
/// # Errors
///
/// Where the shapes differ.
///
/// ```
/// use tch::Tensor;
///
/// let target = Tensor::f_from_slice(&[3.0f32, 4.0, 1.0, 0.0])?.f_view([2, 2])?;
/// let prediction = Tensor::f_from_slice(&[3.0f32, 4.5, 0.0, 0.0])?.f_view([2, 2])?;
/// assert_eq!(isobar_train::loss::relative_l2_errors(&prediction, &target)?, [0.1, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn relative_l2_errors(prediction: &Tensor, target: &Tensor) -> Result<Vec<f64>> {
    same_shape(prediction, target)?;
    let errors = || {
        let _no_grad = tch::no_grad_guard();
        let [p, t] = [prediction, target].map(|tensor| tensor.f_to_kind(Kind::Double));
        Vec::<f64>::try_from(relative_l2(&p?, &t?)?.f_to_device(tch::Device::Cpu)?)
    };
    errors().context(|| "the relative L2 error".to_owned())
}

fn relative_l2(prediction: &Tensor, target: &Tensor) -> std::result::Result<Tensor, TchError> {
    let norm = |x: &Tensor| x.f_flatten(1, -1)?.f_norm_scalaropt_dim(2.0, 1, false);
    norm(&prediction.f_sub(target)?)?.f_div(&norm(target)?)
}

fn same_shape(prediction: &Tensor, target: &Tensor) -> Result<()> {
    let (found, expected) = (prediction.size(), target.size());
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
