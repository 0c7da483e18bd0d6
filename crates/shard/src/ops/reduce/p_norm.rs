//! Norms of any order.

use tch::Tensor;

use super::Over;
use super::extreme::extreme;
use crate::dense::named;
use crate::error::Result;
use crate::tensor::ShardTensor;

/// The norm of order `p` over the dims, as `torch.linalg.vector_norm`: that of the parts' norms, or the extreme of |x|.
pub(super) fn p_norm(op: &'static str, x: &ShardTensor, over: &Over, p: f64) -> Result<ShardTensor> {
    let local = x.local();
    let of = |x: &Tensor, dims: &[i64], keepdim| x.f_norm_scalaropt_dim(p, dims, keepdim);
    if over.axes.is_empty() {
        return over.done(named(op, &[local], of(local, &over.dims, true))?);
    }
    // The gradient is split among equal ones on all ranks, which norms of norms do not do.
    if p.is_infinite() {
        let sizes = ShardTensor::new(named(op, &[local], local.f_abs())?, x.layout().clone());
        return over.done(extreme(op, &sizes, over, p > 0.0)?);
    }
    let is_empty = over.local_count(x) == 0;
    let of_part = |x: &Tensor, dims: &[i64]| match is_empty && p < 0.0 {
        // 1/∞ adds nothing to Σ |x|ᵖ; libtorch refuses a negative order of no elements.
        true => x.f_norm_scalaropt_dim(1.0, dims, true)?.f_add_scalar(f64::INFINITY),
        false => of(x, dims, true),
    };
    over.merged(x, of_part, |all| match p {
        0.0 => all.f_sum_dim_intlist([0].as_slice(), false, all.kind()),
        _ => of(all, &[0], false),
    })
}
