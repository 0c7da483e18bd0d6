//! Combining what several ranks hold, in rank order, so that every rank and every backend gets the same bits.

use isobar_torch::guard::NoGrad;
use tch::{Kind, Tensor};

use crate::error::Result;

/// Reduction of values over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks; of floating and complex values.
    Avg,
    /// The smallest; of values with an order. Of booleans, *and*.
    Min,
    /// The largest; of values with an order. Of booleans, *or*.
    Max,
    /// The product. Of booleans, *and*.
    Product,
}

/// The dtype in which values are combined: 16-bit floats in fp32 where `use_fp32` asks for it.
pub(crate) fn accumulator(kind: Kind, use_fp32: bool) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 if use_fp32 => Kind::Float,
        Kind::ComplexHalf if use_fp32 => Kind::ComplexFloat,
        kind => kind,
    }
}

/// Writes the combination of `parts`, given in rank order, to `target`.
pub(crate) fn combine(target: &Tensor, parts: &[Tensor], op: ReduceOp, use_fp32: bool) -> Result<()> {
    let _guard = NoGrad::new();
    let mut target = target.detach();
    let kind = accumulator(target.kind(), use_fp32);
    match parts {
        [] => return Ok(()),
        [only] => target.f_copy_(only)?,
        [first, second, rest @ ..] if kind == target.kind() => {
            pair_out(&target, first, second, op)?;
            for part in rest {
                pair_out(&target, &target, part, op)?;
            }
            if op == ReduceOp::Avg {
                let _ = target.f_div_scalar_(parts.len() as f64)?;
            }
        }
        [first, rest @ ..] => {
            let sum = first.f_to_kind(kind)?;
            for part in rest {
                pair_out(&sum, &sum, &part.f_to_kind(kind)?, op)?;
            }
            let sum = if op == ReduceOp::Avg { sum.f_div_scalar(parts.len() as f64)? } else { sum };
            target.f_copy_(&sum)?;
        }
    }
    Ok(())
}

fn pair_out(out: &Tensor, a: &Tensor, b: &Tensor, op: ReduceOp) -> Result<()> {
    let _out = match op {
        ReduceOp::Sum | ReduceOp::Avg => a.f_add_out(out, b)?,
        ReduceOp::Min => a.f_minimum_out(out, b)?,
        ReduceOp::Max => a.f_maximum_out(out, b)?,
        ReduceOp::Product if out.kind() == Kind::Bool => a.f_logical_and_out(out, b)?,
        ReduceOp::Product => a.f_mul_out(out, b)?,
    };
    Ok(())
}
