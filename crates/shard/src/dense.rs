//! Checks and dense operators with this crate's errors.

use isobar_array::kernel;
use tch::{TchError, Tensor};

use crate::error::{Error, Result};

/// Adds the operator's name and its tensors to an error of libtorch.
pub(crate) fn named<T>(op: &'static str, tensors: &[&Tensor], result: Result<T, TchError>) -> Result<T> {
    Ok(kernel::named(op, tensors, result)?)
}

/// Returns the error of an argument that an operator cannot take.
pub(crate) fn argument(op: &'static str, reason: impl Into<String>) -> Error {
    kernel::argument(op, reason).into()
}

/// Returns `dim` counted from the front.
pub(crate) fn resolve(op: &'static str, dim: i64, dims: usize) -> Result<usize> {
    Ok(kernel::resolve(op, dim, dims)?)
}
