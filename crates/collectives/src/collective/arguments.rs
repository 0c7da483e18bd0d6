//! Checks and defaults of arguments before a differentiable collective begins.

use tch::Tensor;

use crate::engine::group::Group;
use crate::error::Result;
use crate::local::reduce::ReduceOp;

/// Returns whether `op` divides by the number of ranks; an error if `op` is not linear.
pub(crate) fn averages(op: ReduceOp, operation: &'static str, group: &Group) -> Result<bool> {
    match op {
        ReduceOp::Sum => Ok(false),
        ReduceOp::Avg => Ok(true),
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => Err(group
            .call(operation)
            .refuse(format!("{op:?} has no gradient; detach the tensor, or use Sum or Avg"))),
    }
}

/// Equal parts of `extent`. It is no operation of its own unless it fails: a rank that refuses then speaks of the one
/// that the others wait in.
pub(crate) fn equal_parts(operation: &'static str, extent: i64, group: &Group) -> Result<Vec<i64>> {
    let ranks = group.size() as i64;
    match extent % ranks {
        0 => Ok(vec![extent / ranks; group.size()]),
        _ => group.call(operation).parts(None, extent),
    }
}

/// The extent along `dim`, or 0 where there is no such dim: the collective then refuses it.
pub(crate) fn extent(tensor: &Tensor, dim: i64) -> i64 {
    let dims = tensor.dim() as i64;
    let dim = if dim < 0 { dim + dims } else { dim };
    usize::try_from(dim).ok().and_then(|d| tensor.size().get(d).copied()).unwrap_or(0)
}
