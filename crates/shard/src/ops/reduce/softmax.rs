//! Softmax and its logarithm.

use isobar_collectives::trace::Label;
use isobar_collectives::{copy_to_parallel_region, reduce_from_parallel_region};
use isobar_torch::autograd::Function;
use isobar_torch::guard::NoGrad;
use tch::{TchError, Tensor};

use super::{Over, extreme};
use crate::error::Result;
use crate::ops::{in_full, operator, refuse, resolve, torch, wide};
use crate::tensor::ShardTensor;

impl ShardTensor {
    /// eˣ / Σ eˣ along `dim`. Over a split dim, ranks exchange the maximum and the sum of each row, nothing more.
    ///
    /// # Errors
    ///
    /// A dim that does not exist; dtypes that are not floating; the errors of the exchange.
    pub fn softmax(&self, dim: i64) -> Result<Self> {
        self.soft("softmax", dim, false)
    }

    /// The logarithm of [`softmax`](Self::softmax).
    ///
    /// # Errors
    ///
    /// See [`softmax`](Self::softmax).
    pub fn log_softmax(&self, dim: i64) -> Result<Self> {
        self.soft("log_softmax", dim, true)
    }

    fn soft(&self, op: &'static str, dim: i64, log: bool) -> Result<Self> {
        operator(op, &[self], args!("dim": dim), || {
            let x = in_full(op, &self.resolved()?)?;
            let at = resolve(op, dim, x.ndim())?;
            if !x.layout().is_sharded(at) {
                let local = x.local();
                let y = if log { local.f_log_softmax(dim, None) } else { local.f_softmax(dim, None) };
                return Ok(Self::new(torch(op, y)?, x.layout().clone()));
            }
            let over = Over::new(op, &x, &[dim], true)?;
            let group = x.layout().group_along(&over.axes)?;
            let y = {
                let _guard = NoGrad::new();
                let own = x.local().detach();
                let stats = torch(op, statistics(&own, at as i64, &over))?;
                let everyones = over.everyones(x.layout(), &stats)?;
                torch(op, value(&own, &everyones, log))?
            };
            let at = at as i64;
            let label = Label::current();
            let mut outputs =
                Function::new(op).save(&[&y]).apply(&[x.local()], vec![y], move |context, grads| {
                    let _label = label.backward();
                    let grad = context.grad_or_zeros(grads, 0)?;
                    let y = context.saved(0)?;
                    let total = |terms: &Tensor| -> isobar_collectives::Result<Tensor> {
                        let own = terms.f_sum_dim_intlist([at].as_slice(), true, None)?;
                        copy_to_parallel_region(&reduce_from_parallel_region(&own, &group)?, &group)
                    };
                    let back = match log {
                        true => grad.f_sub(&y.f_exp()?.f_mul(&total(&grad)?)?)?,
                        false => y.f_mul(&grad.f_sub(&total(&grad.f_mul(&y)?)?)?)?,
                    };
                    Ok(vec![Some(back)])
                })?;
            let Some(y) = outputs.pop() else { return refuse(op, "a function lost its output") };
            Ok(Self::new(y, x.layout().clone()))
        })
    }
}

/// The maximum, and the sum of exponentials about it, of each row of a part.
fn statistics(x: &Tensor, dim: i64, over: &Over) -> Result<Tensor, TchError> {
    let kept = over.kept.local_shape();
    let x = &wide(x)?;
    if x.size()[dim as usize] == 0 {
        let none = extreme::never(kept, x, true)?;
        return Tensor::f_stack(&[&none, &none.f_zeros_like()?], 0);
    }
    let most = x.f_amax([dim], true)?;
    // Of a part that is −∞ throughout, e^(x − 0) is 0; x − most would be NaN.
    let shift = most.f_masked_fill(&most.f_eq(f64::NEG_INFINITY)?, 0.0)?;
    let sum = x.f_sub(&shift)?.f_exp()?.f_sum_dim_intlist([dim].as_slice(), true, None)?;
    Tensor::f_stack(&[&most, &sum], 0)
}

/// A part's value, from `[rank, maximum or sum, …]`.
fn value(x: &Tensor, everyones: &Tensor, log: bool) -> Result<Tensor, TchError> {
    let (mosts, sums) = (everyones.f_select(1, 0)?, everyones.f_select(1, 1)?);
    let most = mosts.f_amax([0], false)?;
    // Parts without elements have none to add, whatever e^(−∞ − most) is.
    let scaled = mosts.f_sub(&most)?.f_exp()?.f_mul(&sums)?;
    let empty = sums.f_eq(0.0)?;
    let sum = scaled.f_masked_fill(&empty, 0.0)?.f_sum_dim_intlist([0].as_slice(), false, None)?;
    let shifted = wide(x)?.f_sub(&most)?;
    let y = if log { shifted.f_sub(&sum.f_log()?)? } else { shifted.f_exp()?.f_div(&sum)? };
    y.f_to_kind(x.kind())
}

crate::register! {
    /// eˣ / Σ eˣ along `dim`.
    "softmax"(input: Floating; dim) Rows: |call| call.tensor(0)?.softmax(call.get("dim")?);
    /// x − ln Σ eˣ along `dim`.
    "log_softmax"(input: Floating; dim) Rows: |call| call.tensor(0)?.log_softmax(call.get("dim")?);
}
