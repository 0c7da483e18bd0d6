//! Gradient clipping by the true global norm.

use tch::{Kind, TchError, Tensor};

use crate::error::{Context, Error, Result};
use crate::gradients::refuse_unsummed;
use crate::optim::as_real;
use crate::params::{ParamPlacement, Parameter, Parameters};

/// The 2-norm of all gradients as one vector: a replicated parameter counts once, the parts of a sharded one are
/// summed over the model-parallel group, in float64. The same number, to the last bit, on every rank.
///
/// Every rank of the model-parallel group calls, after the gradients have been reduced over the data-parallel group.
///
/// # Errors
///
/// [`Error::NonFiniteGradient`] on every rank of the group where any gradient holds NaN or infinity; [`Error::WrongGradients`] where
/// they are still to be summed over ranks.
///
/// ```
/// use isobar_train::{Parameter, Parameters, grad_norm};
/// use tch::Tensor;
///
/// let x = Tensor::f_from_slice(&[3.0f64, 4.0])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// x.f_square()?.f_sum(None)?.f_backward()?; // the gradient is [6, 8]
/// assert_eq!(grad_norm(&params)?, 10.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn grad_norm(params: &Parameters) -> Result<f64> {
    refuse_unsummed(params)?;
    let local = LocalNorm::of(params)?;
    let group = params.model_group();
    let all = match group.size() {
        1 => vec![local.encode()],
        _ => group.all_gather_bytes(&local.encode())?,
    };
    let all: Vec<LocalNorm> = all.iter().filter_map(|bytes| LocalNorm::decode(bytes)).collect();
    for (rank, norm) in all.iter().enumerate() {
        if let Some(name) = &norm.not_finite {
            return Err(Error::NonFiniteGradient {
                name: name.clone(),
                rank,
                group: group.name().to_owned(),
            });
        }
    }
    let replicated = all.first().map_or(0.0, |norm| norm.replicated);
    Ok((replicated + all.iter().map(|norm| norm.sharded).sum::<f64>()).sqrt())
}

/// Scales all gradients, in place, so that their [`grad_norm`] is at most `max_norm`, and returns the norm before it.
///
/// The factor is max_norm / (norm + 1e-6) where that is below 1, as in `torch.nn.utils.clip_grad_norm_`.
///
/// # Errors
///
/// As [`grad_norm`]; where `max_norm` is not above 0; where libtorch refuses.
///
/// ```
/// use isobar_train::{Parameter, Parameters, clip_grad_norm};
/// use tch::Tensor;
///
/// let x = Tensor::f_from_slice(&[3.0f64, 4.0])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// x.f_square()?.f_sum(None)?.f_backward()?; // the gradient is [6, 8]
/// assert_eq!(clip_grad_norm(&params, 1.0)?, 10.0);
/// assert!((x.f_grad()?.f_norm()?.f_double_value(&[])? - 1.0).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn clip_grad_norm(params: &Parameters, max_norm: f64) -> Result<f64> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::invalid("the norm to clip to", max_norm, "a number above 0"));
    }
    unscale_and_clip(params, 1.0, Some(max_norm))
}

/// Divides all gradients by the `scale` that the loss was multiplied by, and clips them where there is a limit; the norm before
/// the clipping.
pub(crate) fn unscale_and_clip(params: &Parameters, scale: f64, limit: Option<f64>) -> Result<f64> {
    let norm = grad_norm(params)? / scale;
    let clip = limit.map_or(1.0, |limit| f64::min(1.0, limit / (norm + 1e-6)));
    let factor = clip / scale;
    if factor != 1.0 {
        let _no_grad = tch::no_grad_guard();
        for param in params {
            let Some(mut grad) = param.grad() else { continue };
            let _ =
                grad.f_mul_scalar_(factor).context(|| format!("scaling the gradient of {:?}", param.name))?;
        }
    }
    Ok(norm)
}

/// One rank's part of the squared norm.
#[derive(Debug, Default)]
struct LocalNorm {
    replicated: f64,
    sharded: f64,
    not_finite: Option<String>,
}

impl LocalNorm {
    fn of(params: &Parameters) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let with_grad: Vec<(&Parameter, Tensor)> =
            params.iter().filter_map(|p| Some((p, p.grad()?))).collect();
        let squares = with_grad
            .iter()
            .map(|(p, grad)| square(grad).context(|| format!("the norm of the gradient of {:?}", p.name)))
            .collect::<Result<Vec<_>>>()?;
        let mut norm = Self::default();
        for ((param, _), square) in with_grad.iter().zip(to_host(&squares)?) {
            match param.placement {
                ParamPlacement::Replicate => norm.replicated += square,
                ParamPlacement::Shard { .. } => norm.sharded += square,
                ParamPlacement::Part { copies, .. } => norm.sharded += square / copies as f64,
            }
            if !square.is_finite() && norm.not_finite.is_none() {
                norm.not_finite = Some(param.name.clone());
            }
        }
        Ok(norm)
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.replicated.to_le_bytes().to_vec();
        bytes.extend(self.sharded.to_le_bytes());
        bytes.extend(self.not_finite.as_deref().unwrap_or_default().as_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(f64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let name = String::from_utf8_lossy(bytes.get(16..)?).into_owned();
        let not_finite = (!name.is_empty()).then_some(name);
        Some(Self { replicated: number(0)?, sharded: number(8)?, not_finite })
    }
}

fn square(grad: &Tensor) -> std::result::Result<Tensor, TchError> {
    let flat = as_real(grad)?.f_to_kind(Kind::Double)?.f_flatten(0, -1)?;
    flat.f_dot(&flat)
}

/// One transfer from the device for all numbers.
fn to_host(scalars: &[Tensor]) -> Result<Vec<f64>> {
    if scalars.is_empty() {
        return Ok(Vec::new());
    }
    let stacked = Tensor::f_stack(scalars, 0).and_then(|t| t.f_to_device(tch::Device::Cpu));
    stacked.and_then(|t| Vec::<f64>::try_from(&t)).context(|| "reading the norms of gradients".to_owned())
}
