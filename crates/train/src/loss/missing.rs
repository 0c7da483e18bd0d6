//! Missing values of fields, which are NaN: which points count, and what takes their place. Communicates nothing.

use isobar_array::Array;
use tch::{TchError, Tensor};

use crate::error::Result;
use crate::loss::Weighting;

/// Replaces missing values by a number, if one is given.
pub(crate) fn fill(field: &Tensor, by: Option<f64>) -> Result<Tensor, TchError> {
    match by {
        None => Ok(field.shallow_clone()),
        Some(value) => field.f_nan_to_num(value, f64::INFINITY, f64::NEG_INFINITY),
    }
}

/// Returns true where a field has a value.
pub(crate) fn present(field: &Tensor) -> Result<Tensor, TchError> {
    field.f_isnan()?.f_logical_not()
}

/// Returns true where a target `[sample, channel, …]` has a value, and, of its first channels, where `from` has one, too.
pub(crate) fn present_in_both(target: &Tensor, from: &Tensor) -> Result<Tensor, TchError> {
    let own = present(target)?;
    let (from, channels) = (present(from)?, from.size().get(1).copied().unwrap_or(0));
    let all = own.size().get(1).copied().unwrap_or(0);
    let both =
        own.f_narrow(1, 0, channels.min(all))?.f_logical_and(&from.f_narrow(1, 0, channels.min(all))?)?;
    match channels < all {
        false => Ok(both),
        true => Tensor::f_cat(&[both, own.f_narrow(1, channels, all - channels)?], 1),
    }
}

/// Sets both fields to zero where a mask does not count.
pub(crate) fn counted<A: Array>(prediction: &A, target: &A, mask: &A) -> Result<(A, A)> {
    let weights = Weighting::default().with_mask(mask.shallow_clone());
    Ok((weights.fill(prediction)?, weights.fill(target)?))
}
