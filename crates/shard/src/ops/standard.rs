//! Standardisation: to mean 0 and variance 1 over some dims.

use isobar_collectives::trace::Label;
use isobar_collectives::{copy_to_parallel_region, reduce_from_parallel_region};
use isobar_torch::autograd::Function;
use isobar_torch::guard::NoGrad;
use tch::{Kind, Tensor};

use super::reduce::{Over, welford};
use super::{refuse, torch};
use crate::error::Result;
use crate::tensor::ShardTensor;

/// A tensor of mean 0 and variance 1, and the statistics that were taken out, with the dims kept.
pub(super) struct Standard {
    pub(super) y: ShardTensor,
    pub(super) mean: Tensor,
    pub(super) var: Tensor,
    pub(super) count: i64,
}

/// Mean 0 and variance 1 over dims. One exchange forward, of means and squared deviations, and one backward, of two sums;
/// its gradient has gradients.
pub(super) fn standardize(op: &'static str, x: &ShardTensor, dims: &[usize], eps: f64) -> Result<Standard> {
    let layout = x.layout();
    let count: i64 = dims.iter().map(|&dim| x.shape()[dim]).product();
    if count == 0 {
        return refuse(op, format!("{:?} has no elements to take statistics of", x.shape()));
    }
    let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
    let over = Over::new(op, x, &dims, true)?;
    let group = match over.axes.is_empty() {
        true => None,
        false => Some(layout.group_along(&over.axes)?),
    };
    let (y, rstd, mean, var) = {
        let _guard = NoGrad::new();
        let local = x.local().detach();
        let (mean, squares) = welford::moments(op, &x.detach(), &over)?;
        let var = torch(op, squares.f_div_scalar(count as f64))?;
        let rstd = torch(op, var.f_add_scalar(eps).and_then(|v| v.f_rsqrt()))?;
        let y = torch(
            op,
            local.f_to_kind(mean.kind()).and_then(|x| x.f_sub(&mean)).and_then(|x| x.f_mul(&rstd)),
        )?;
        (y, rstd, mean, var)
    };
    let kind = x.kind();
    let (input, n) = (x.local(), count as f64);
    let label = Label::current();
    let outputs =
        Function::new(op).save(&[&y, &rstd]).apply(&[input], vec![y, rstd], move |context, grads| {
            let _label = label.backward();
            let (y, rstd) = (context.saved(0)?, context.saved(1)?);
            let grad = context.grad_or_zeros(grads, 0)?;
            let total = |terms: &Tensor| terms.f_sum_dim_intlist(dims.as_slice(), true, None);
            let sums = Tensor::f_stack(&[total(&grad)?, total(&grad.f_mul(&y)?)?], 0)?;
            let (sums, rstd) = match &group {
                Some(group) => (
                    copy_to_parallel_region(&reduce_from_parallel_region(&sums, group)?, group)?,
                    copy_to_parallel_region(&rstd, group)?,
                ),
                None => (sums, rstd),
            };
            let means = sums.f_div_scalar(n)?;
            let centred = grad.f_sub(&means.f_select(0, 0)?)?.f_sub(&y.f_mul(&means.f_select(0, 1)?)?)?;
            let mut back = centred.f_mul(&rstd)?;
            // Of the deviation's inverse, which gradients of gradients use.
            if let Some(Some(of_rstd)) = grads.get(1) {
                let of_rstd = match &group {
                    Some(group) => copy_to_parallel_region(of_rstd, group)?,
                    None => of_rstd.shallow_clone(),
                };
                let term = y.f_mul(&rstd.f_square()?)?.f_mul(&of_rstd)?.f_div_scalar(n)?;
                back = back.f_sub(&term)?;
            }
            Ok(vec![Some(back.f_to_kind(kind)?)])
        })?;
    let y = match outputs.into_iter().next() {
        Some(y) if y.kind() == Kind::Float && kind != Kind::Float => torch(op, y.f_to_kind(kind))?,
        Some(y) => y,
        None => return refuse(op, "a function lost its output"),
    };
    Ok(Standard { y: ShardTensor::new(y, layout.clone()), mean, var, count })
}
