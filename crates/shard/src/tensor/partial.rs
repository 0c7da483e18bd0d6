//! Gradients on their way from a partial tensor to the ranks' parts, and back.

use isobar_collectives::trace::Label;
use isobar_collectives::{ReduceOp, all_gather_v, all_reduce};
use isobar_torch::autograd::Function;
use isobar_torch::guard::is_grad_enabled;
use tch::Tensor;

use super::ShardTensor;
use crate::error::{Error, Result};
use crate::layout::Placement;

impl ShardTensor {
    /// The tensor whose partial parts come from outside: the gradient of the tensor, which is replicated, becomes that of each
    /// rank's part. A sum hands it on; a mean divides it; extrema give it to the ranks that attain them, evenly; a product
    /// multiplies it by the others.
    pub(super) fn entering_parts(self) -> Result<Self> {
        if !is_grad_enabled() || !self.local().requires_grad() {
            return Ok(self);
        }
        let (ops, layout) = (self.partial_ops(), self.layout().clone());
        let along = |op: ReduceOp| -> Vec<usize> {
            let axes = layout.placements().iter().enumerate();
            axes.filter(|(_, placement)| **placement == Placement::Partial(op))
                .map(|(axis, _)| axis)
                .collect()
        };
        let averages = ops.contains(&ReduceOp::Avg);
        let picked: Vec<ReduceOp> =
            ops.iter().copied().filter(|op| !matches!(op, ReduceOp::Sum | ReduceOp::Avg)).collect();
        let mut local = self.local().shallow_clone();
        match &picked[..] {
            [] => {}
            [op] if ops.len() == 1 => {
                let group = layout.group_along(&along(*op))?;
                local = picking(&local, *op, group)?;
            }
            _ => return Err(Self::no_gradient("parts that are combined in several ways")),
        }
        if averages {
            let ranks = layout.group_along(&along(ReduceOp::Avg))?.size() as f64;
            local = scaled(&local, 1.0 / ranks)?;
        }
        Ok(Self::new(local, layout))
    }

    /// This rank's part on its way to a function of local parts, whose result enters again: what entering does to gradients is
    /// undone.
    pub(crate) fn leaving_parts(&self, local: Tensor) -> Result<Tensor> {
        let ops = self.partial_ops();
        if !is_grad_enabled() || !local.requires_grad() {
            return Ok(local);
        }
        if ops.iter().any(|op| !matches!(op, ReduceOp::Sum | ReduceOp::Avg)) {
            return Err(Self::no_gradient(
                "a function of the parts of a partial product, minimum or maximum",
            ));
        }
        let averaged = self.placements().iter().zip(self.layout().mesh_shape());
        let averaged = averaged.filter(|(placement, _)| **placement == Placement::Partial(ReduceOp::Avg));
        let ranks: usize = averaged.map(|(_, ranks)| ranks).product();
        if ranks == 1 { Ok(local) } else { scaled(&local, ranks as f64) }
    }

    /// The operations that the tensor waits for, each once.
    fn partial_ops(&self) -> Vec<ReduceOp> {
        let mut ops = Vec::new();
        for placement in self.placements() {
            if let Placement::Partial(op) = placement
                && !ops.contains(op)
            {
                ops.push(*op);
            }
        }
        ops
    }

    fn no_gradient(what: &str) -> Error {
        Error::from(isobar_array::Error::Argument {
            op: "partial",
            reason: format!("{what} have no gradient; redistribute to Replicate first, or detach"),
        })
    }
}

/// The identity, whose gradient is multiplied.
fn scaled(local: &Tensor, by: f64) -> Result<Tensor> {
    let mut outputs =
        Function::new("partial").apply(&[local], vec![local.detach()], move |context, grads| {
            Ok(vec![Some(context.grad_or_zeros(grads, 0)?.f_mul_scalar(by)?)])
        })?;
    Ok(outputs.pop().unwrap_or_else(|| local.shallow_clone()))
}

/// The identity, whose gradient goes to the parts that an extreme or a product is of.
fn picking(local: &Tensor, op: ReduceOp, group: isobar_collectives::Group) -> Result<Tensor> {
    let label = Label::current();
    let function = Function::new("partial").save(&[local]);
    let mut outputs = function.apply(&[local], vec![local.detach()], move |context, grads| {
        let _label = label.backward();
        let grad = context.grad_or_zeros(grads, 0)?;
        let own = context.saved(0)?.detach();
        let factor = match op {
            ReduceOp::Product if is_grad_enabled() => {
                return Err("gradients of gradients of a partial product are not available".into());
            }
            ReduceOp::Product => {
                let parts = all_gather_v(&own.f_unsqueeze(0)?, None, 0, true, &group)?;
                let me = group.rank() as i64;
                let rest = group.size() as i64 - me - 1;
                let others =
                    Tensor::f_cat(&[parts.f_narrow(0, 0, me)?, parts.f_narrow(0, me + 1, rest)?], 0)?;
                others.f_prod_dim_int(0, false, None)?
            }
            _ => {
                let best = all_reduce(&own, op, &group)?;
                let hit = own.f_eq_tensor(&best)?.f_to_kind(own.kind())?;
                hit.f_div(&all_reduce(&hit, ReduceOp::Sum, &group)?)?
            }
        };
        Ok(vec![Some(grad.f_mul(&factor)?)])
    })?;
    Ok(outputs.pop().unwrap_or_else(|| local.shallow_clone()))
}
