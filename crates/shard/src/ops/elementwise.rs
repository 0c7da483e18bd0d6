//! Functions of each element.

use isobar_collectives::ReduceOp;
use tch::{Kind, Scalar, Tensor};

use super::align::align;
use super::{rule, torch};
use crate::array::{Binary, Elementwise, Unary};
use crate::error::Result;
use crate::layout::{Dim, Placement};
use crate::tensor::ShardTensor;

impl Elementwise for ShardTensor {
    fn unary(&self, function: Unary) -> Result<Self> {
        // What is linear may be done before the sum.
        let linear = matches!(function, Unary::Neg | Unary::MulScalar(_));
        let sums = |placement: &Placement| {
            !placement.is_partial() || matches!(placement, Placement::Partial(ReduceOp::Sum | ReduceOp::Avg))
        };
        if !self.layout().is_partial() || (linear && self.placements().iter().all(sums)) {
            return match self.local().unary(function) {
                Ok(y) => Ok(Self::new(y, self.layout().clone())),
                Err(error) => rule("unary", &[self], || Err(error)),
            };
        }
        self.resolved()?.unary(function)
    }

    fn binary(&self, function: Binary, other: &Self) -> Result<Self> {
        // The common case, without a detour.
        if self.layout() == other.layout() {
            let adds = matches!(function, Binary::Add | Binary::Sub);
            let sums = |p: &Placement| {
                !p.is_partial() || matches!(p, Placement::Partial(ReduceOp::Sum | ReduceOp::Avg))
            };
            if !self.layout().is_partial() || (adds && self.placements().iter().all(sums)) {
                return match self.local().binary(function, other.local()) {
                    Ok(y) => Ok(Self::new(y, self.layout().clone())),
                    Err(error) => rule("binary", &[self, other], || Err(error)),
                };
            }
        }
        rule("binary", &[self, other], || {
            let (layout, locals) = align("binary", &[self, other])?;
            Ok(Self::new(locals[0].binary(function, &locals[1])?, layout))
        })
    }

    fn select_where(&self, on_true: &Self, on_false: &Self) -> Result<Self> {
        rule("where", &[self, on_true, on_false], || {
            let (layout, locals) = align("where", &[self, on_true, on_false])?;
            Ok(Self::new(locals[0].select_where(&locals[1], &locals[2])?, layout))
        })
    }

    fn prelu(&self, weight: &Self) -> Result<Self> {
        rule("prelu", &[self, weight], || {
            let x = self.resolved()?;
            // One weight for each channel stands along dim 1.
            let weight = weight.resolved()?;
            let at = if weight.layout().numel() == 1 { x.ndim().saturating_sub(1) } else { 1 };
            let ones = (0..x.ndim()).map(|dim| match (dim == at, weight.layout().dims().first()) {
                (true, Some(channels)) => channels.clone(),
                _ => Dim::whole(1),
            });
            let layout = weight.layout().with_dims(ones.collect());
            let view = torch("prelu", weight.local().f_reshape(layout.local_shape()))?;
            let weight = Self::new(view, layout);
            let (layout, locals) = align("prelu", &[&x, &weight])?;
            let [x, weight] = &locals[..] else { return super::refuse("prelu", "it takes two tensors") };
            let negative = torch("prelu", x.f_clamp_max(0.0).and_then(|low| low.f_mul(weight)))?;
            let y = torch("prelu", x.f_relu().and_then(|high| high.f_add(&negative)))?;
            Ok(Self::new(y, layout))
        })
    }
}

/// A comparison of two tensors, element by element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// a = b
    Eq,
    /// a ≠ b
    Ne,
    /// a < b
    Lt,
    /// a ≤ b
    Le,
    /// a > b
    Gt,
    /// a ≥ b
    Ge,
}

impl ShardTensor {
    /// Compares the elements of both, whose shapes are broadcast to each other; booleans.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast; different meshes.
    pub fn compare(&self, comparison: Comparison, other: &Self) -> Result<Self> {
        rule("compare", &[self, other], || {
            let (layout, locals) = align("compare", &[self, other])?;
            let (a, b) = (&locals[0], &locals[1]);
            let result = match comparison {
                Comparison::Eq => a.f_eq_tensor(b),
                Comparison::Ne => a.f_ne_tensor(b),
                Comparison::Lt => a.f_lt_tensor(b),
                Comparison::Le => a.f_le_tensor(b),
                Comparison::Gt => a.f_gt_tensor(b),
                Comparison::Ge => a.f_ge_tensor(b),
            };
            Ok(Self::new(torch("compare", result)?, layout))
        })
    }

    /// The elements in another kind.
    ///
    /// # Errors
    ///
    /// A cast that libtorch refuses.
    pub fn to_kind(&self, kind: Kind) -> Result<Self> {
        self.map("to_kind", |x| x.f_to_kind(kind))
    }

    /// `value` where `mask`, a boolean tensor that is broadcast to this one's shape, is true.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast; different meshes.
    pub fn masked_fill(&self, mask: &Self, value: impl Into<Scalar>) -> Result<Self> {
        let value = value.into();
        rule("masked_fill", &[self, mask], || {
            let (layout, locals) = align("masked_fill", &[self, mask])?;
            Ok(Self::new(torch("masked_fill", locals[0].f_masked_fill(&locals[1], value))?, layout))
        })
    }

    /// The tensor of the result of any function of each element of several tensors, such as one that libtorch fuses: `f` gets
    /// the local parts, broadcast to each other, and must treat each element alone.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast; different meshes; what `f` refuses.
    pub fn elementwise(
        tensors: &[&Self],
        f: impl FnOnce(&[Tensor]) -> Result<Tensor, tch::TchError>,
    ) -> Result<Self> {
        rule("elementwise", tensors, || {
            if tensors.is_empty() {
                return super::refuse("elementwise", "no tensors were given");
            }
            let (layout, locals) = align("elementwise", tensors)?;
            let y = torch("elementwise", f(&locals))?;
            if y.size() != layout.local_shape() {
                let reason = format!("the function gave {:?}, expected {:?}", y.size(), layout.local_shape());
                return super::refuse("elementwise", reason);
            }
            Ok(Self::new(y, layout))
        })
    }
}
