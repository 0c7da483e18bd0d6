//! Functions of each element.

use isobar_array::{Binary, Comparison, Elementwise, Unary};
use isobar_collectives::ReduceOp;
use tch::{Kind, Scalar, Tensor};

use super::align::align;
use super::{operator, rule, torch};
use crate::error::Result;
use crate::layout::{Dim, Placement};
use crate::promote::Operand;
use crate::tensor::ShardTensor;

/// Returns whether linear functions may be applied before the reduction: the tensor is replicated, or a partial sum.
fn adds(x: &ShardTensor) -> bool {
    let sums = |placement: &Placement| {
        !placement.is_partial() || matches!(placement, Placement::Partial(ReduceOp::Sum | ReduceOp::Avg))
    };
    x.placements().iter().all(sums)
}

impl Elementwise for ShardTensor {
    fn unary(&self, function: Unary) -> isobar_array::Result<Self> {
        let linear = matches!(function, Unary::Neg | Unary::MulScalar(_));
        let at_once = |x: &Self| Ok(Self::new(x.local().unary(function)?, x.layout().clone()));
        let args = || function.args();
        Ok(operator(function.name(), &[self], args, || {
            match !self.layout().is_partial() || (linear && adds(self)) {
                true => at_once(self),
                false => at_once(&self.resolved()?),
            }
        })?)
    }

    fn binary(&self, function: Binary, other: &Self) -> isobar_array::Result<Self> {
        let op = function.name();
        Ok(operator(op, &[self, other], args!(), || {
            let linear = matches!(function, Binary::Add | Binary::Sub);
            // The common case, without a detour.
            if self.layout() == other.layout() && (!self.layout().is_partial() || (linear && adds(self))) {
                return Ok(Self::new(self.local().binary(function, other.local())?, self.layout().clone()));
            }
            let (layout, locals) = align(op, &[self, other])?;
            Ok(Self::new(locals[0].binary(function, &locals[1])?, layout))
        })?)
    }

    fn select_where(&self, on_true: &Self, on_false: &Self) -> isobar_array::Result<Self> {
        Ok(operator("where", &[self, on_true, on_false], args!(), || {
            let (layout, locals) = align("where", &[self, on_true, on_false])?;
            Ok(Self::new(locals[0].select_where(&locals[1], &locals[2])?, layout))
        })?)
    }

    fn prelu(&self, weight: &Self) -> isobar_array::Result<Self> {
        Ok(operator("prelu", &[self, weight], args!(), || {
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
        })?)
    }

    fn compare(&self, comparison: Comparison, other: &Self) -> isobar_array::Result<Self> {
        let op = comparison.name();
        Ok(operator(op, &[self, other], args!(), || {
            let (layout, locals) = align(op, &[self, other])?;
            Ok(Self::new(locals[0].compare(comparison, &locals[1])?, layout))
        })?)
    }

    fn masked_fill(&self, mask: &Self, value: f64) -> isobar_array::Result<Self> {
        Ok(ShardTensor::masked_fill(self, mask, value)?)
    }
}

#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: shapes that do not broadcast, different meshes, a plain tensor where promotion is off"
)]
impl ShardTensor {
    /// `function` of the elements of both, whose shapes are broadcast to each other.
    pub fn binary(&self, function: Binary, other: &dyn Operand) -> Result<Self> {
        Ok(Elementwise::binary(self, function, &*other.beside(function.name(), self)?)?)
    }

    /// The sum.
    pub fn add(&self, other: &dyn Operand) -> Result<Self> {
        self.binary(Binary::Add, other)
    }

    /// The difference.
    pub fn sub(&self, other: &dyn Operand) -> Result<Self> {
        self.binary(Binary::Sub, other)
    }

    /// The product.
    pub fn mul(&self, other: &dyn Operand) -> Result<Self> {
        self.binary(Binary::Mul, other)
    }

    /// The quotient.
    pub fn div(&self, other: &dyn Operand) -> Result<Self> {
        self.binary(Binary::Div, other)
    }

    /// The elements of `on_true` where this boolean tensor is true, else those of `on_false`.
    pub fn select_where(&self, on_true: &dyn Operand, on_false: &dyn Operand) -> Result<Self> {
        let (on_true, on_false) = (on_true.beside("where", self)?, on_false.beside("where", self)?);
        Ok(Elementwise::select_where(self, &*on_true, &*on_false)?)
    }
}

impl ShardTensor {
    /// Compares the elements of both, whose shapes are broadcast to each other; booleans.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast; different meshes.
    pub fn compare(&self, comparison: Comparison, other: &dyn Operand) -> Result<Self> {
        Ok(Elementwise::compare(self, comparison, &*other.beside(comparison.name(), self)?)?)
    }

    /// The elements in another kind.
    ///
    /// # Errors
    ///
    /// A cast that libtorch refuses.
    pub fn to_kind(&self, kind: Kind) -> Result<Self> {
        operator("to_kind", &[self], args!("kind": format!("{kind:?}")), || {
            let x = self.resolved()?;
            x.viewed("to_kind", x.layout().clone(), |x| x.f_to_kind(kind))
        })
    }

    /// `value` where `mask`, a boolean tensor that is broadcast to this one's shape, is true.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast; different meshes.
    pub fn masked_fill(&self, mask: &dyn Operand, value: impl Into<Scalar>) -> Result<Self> {
        let (mask, value) = (&*mask.beside("masked_fill", self)?, value.into());
        let number = f64::from(&value);
        operator("masked_fill", &[self, mask], args!("value": isobar_array::kernel::number(number)), || {
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
