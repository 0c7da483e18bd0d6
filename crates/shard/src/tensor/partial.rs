//! Gradients on their way from a partial tensor to the ranks' parts.

use isobar_collectives::trace::Label;
use isobar_collectives::{ReduceOp, all_gather_v, all_reduce};
use isobar_torch::autograd::Function;
use isobar_torch::guard::{NoGrad, is_grad_enabled};
use tch::Tensor;

use super::ShardTensor;
use crate::error::Result;
use crate::layout::Placement;

impl ShardTensor {
    /// The tensor whose partial parts come from outside: the gradient of the tensor, which is replicated, becomes that of each
    /// rank's part. A sum hands it on; a mean divides it; extrema give it to the ranks that attain them, evenly; a product
    /// multiplies it by the others.
    pub(super) fn entering_parts(self) -> Result<Self> {
        if !is_grad_enabled() || !self.local.requires_grad() {
            return Ok(self);
        }
        let mut local = self.local.shallow_clone();
        for (axis, placement) in self.layout.placements().iter().enumerate() {
            let Placement::Partial(op) = *placement else { continue };
            if op == ReduceOp::Sum {
                continue;
            }
            let group = self.layout.group_along(&[axis])?;
            let y = {
                let _guard = NoGrad::new();
                local.detach()
            };
            let label = Label::current();
            let mut outputs = Function::new("partial").save(&[&local]).apply(
                &[&local],
                vec![y],
                move |context, grads| {
                    let _label = label.backward();
                    let grad = context.grad_or_zeros(grads, 0)?;
                    let own = context.saved(0)?.detach();
                    let factor = match op {
                        ReduceOp::Avg => return Ok(vec![Some(grad.f_div_scalar(group.size() as f64)?)]),
                        ReduceOp::Product => {
                            let parts = all_gather_v(&own.f_unsqueeze(0)?, None, 0, true, &group)?;
                            let me = group.rank() as i64;
                            let rest = group.size() as i64 - me - 1;
                            let others = Tensor::f_cat(
                                &[parts.f_narrow(0, 0, me)?, parts.f_narrow(0, me + 1, rest)?],
                                0,
                            )?;
                            others.f_prod_dim_int(0, false, None)?
                        }
                        _ => {
                            let best = all_reduce(&own, op, &group)?;
                            let hit = own.f_eq_tensor(&best)?.f_to_kind(own.kind())?;
                            hit.f_div(&all_reduce(&hit, ReduceOp::Sum, &group)?)?
                        }
                    };
                    Ok(vec![Some(grad.f_mul(&factor)?)])
                },
            )?;
            local = outputs.pop().unwrap_or(local);
        }
        Ok(Self::new(local, self.layout))
    }
}
