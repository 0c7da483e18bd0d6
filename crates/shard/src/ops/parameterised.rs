//! Parameters of functions of each element for which libtorch's bindings have only the default.

use isobar_array::kernel::{full, number};
use isobar_array::{Elementwise, Unary};
use tch::{Kind, TchError, Tensor};

use super::{torch, wide};
use crate::error::Result;
use crate::rules::Call;
use crate::tensor::ShardTensor;

/// ELU with the scale `alpha`.
pub(super) fn elu(call: &Call<'_>) -> Result<ShardTensor> {
    call.only("inplace", false)?;
    let (x, alpha) = (call.tensor(0)?, call.or("alpha", 1.0)?);
    match alpha == 1.0 {
        true => Ok(x.unary(Unary::Elu)?),
        false => x.map("elu", args!("alpha": number(alpha)), |x| exponential(x, alpha, 1.0)),
    }
}

/// CELU with the scale `alpha`.
pub(super) fn celu(call: &Call<'_>) -> Result<ShardTensor> {
    call.only("inplace", false)?;
    let (x, alpha) = (call.tensor(0)?, call.or("alpha", 1.0)?);
    if alpha == 0.0 {
        return call.refuse("\"alpha\" is 0; expected another number");
    }
    match alpha == 1.0 {
        true => Ok(x.unary(Unary::Celu)?),
        false => x.map("celu", args!("alpha": number(alpha)), |x| exponential(x, alpha, 1.0 / alpha)),
    }
}

/// Softplus with the scale `beta`, linear above `threshold`.
pub(super) fn softplus(call: &Call<'_>) -> Result<ShardTensor> {
    let (beta, threshold): (f64, f64) = (call.or("beta", 1.0)?, call.or("threshold", 20.0)?);
    let x = call.tensor(0)?;
    if beta == 1.0 && threshold == 20.0 {
        return Ok(x.unary(Unary::Softplus)?);
    }
    let args = args!("beta": number(beta), "threshold": number(threshold));
    x.map("softplus", args, |x| {
        let x = full(x)?;
        let kind = x.kind();
        let x = wide(&x)?;
        let scaled = x.f_mul_scalar(beta)?;
        // (The clamp keeps the gradient of the part that is not taken finite.)
        let curved = scaled.f_clamp_max(threshold)?.f_exp()?.f_log1p()?.f_div_scalar(beta)?;
        x.f_where_self(&scaled.f_gt(threshold)?, &curved)?.f_to_kind(kind)
    })
}

/// x above 0, else `scale` · (exp(`rate` · x) − 1).
fn exponential(x: &Tensor, scale: f64, rate: f64) -> Result<Tensor, TchError> {
    let wide = wide(x)?;
    let low = wide.f_clamp_max(0.0)?.f_mul_scalar(rate)?.f_expm1()?.f_mul_scalar(scale)?;
    wide.f_where_self(&wide.f_gt(0.0)?, &low)?.f_to_kind(x.kind())
}

/// The tensor `y`, which is to be added to `x`, times the argument `alpha` in the dtype of the sum.
pub(super) fn times_alpha(call: &Call<'_>, x: &ShardTensor, y: &ShardTensor) -> Result<ShardTensor> {
    let alpha: f64 = call.or("alpha", 1.0)?;
    if alpha == 1.0 {
        return Ok(y.shallow_clone());
    }
    let kind = torch("add", kind_of_sum(x, y))?;
    let is_integer = matches!(kind, Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64);
    if kind == Kind::Bool || (is_integer && alpha.fract() != 0.0) {
        let reason = "expected an integer, or a tensor of a floating dtype: convert it with to_kind";
        return call.refuse(format!("\"alpha\" is {alpha} for a result of dtype {kind:?}; {reason}"));
    }
    let y = if y.kind() == kind { y.shallow_clone() } else { y.to_kind(kind)? };
    match is_integer {
        // A floating factor would make it floating.
        true => ShardTensor::elementwise(&[&y], |y| y[0].f_mul_scalar(alpha as i64)),
        false => Ok(y.unary(Unary::MulScalar(alpha))?),
    }
}

/// The dtype of the sum, which depends on the dtypes and on which tensors have dims.
fn kind_of_sum(x: &ShardTensor, y: &ShardTensor) -> Result<Kind, TchError> {
    let one = |of: &ShardTensor| Tensor::f_zeros(vec![1; of.ndim()], (of.kind(), of.device()));
    Ok(one(x)?.f_add(&one(y)?)?.kind())
}
