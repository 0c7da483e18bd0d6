//! Functions of each element.

use isobar_array::kernel::{check_number, lowered};
use isobar_array::{Binary, Comparison, Convert, Elementwise, Unary};
use isobar_collectives::ReduceOp;
use serde_json::Value;
use tch::{Device, Kind, Scalar, TchError, Tensor};

use super::align::align;
use super::{operator, parameterised, rule, torch};
use crate::error::{Error, Result};
use crate::layout::{Dim, Placement};
use crate::promote::Operand;
use crate::rules::Call;
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
            let (x, weight) = (&torch("prelu", lowered(x))?, &torch("prelu", lowered(weight))?);
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
        Ok(Elementwise::binary(self, function, &*other.promote(function.name(), self)?)?)
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
        let (on_true, on_false) = (on_true.promote("where", self)?, on_false.promote("where", self)?);
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
        Ok(Elementwise::compare(self, comparison, &*other.promote(comparison.name(), self)?)?)
    }

    /// Converts the elements to another dtype.
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
        let (mask, value) = (&*mask.promote("masked_fill", self)?, value.into());
        let number = f64::from(&value);
        operator("masked_fill", &[self, mask], args!("value": isobar_array::kernel::number(number)), || {
            check_number("masked_fill", number, self.kind())?;
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

crate::register! {
    /// The elements as `kind`, a dtype of libtorch such as `Float` or `BFloat16`.
    "to_kind"(input; kind) Nothing: |call| call.tensor(0)?.to_kind(call.kind("kind")?);
    /// The tensor on `device`, such as `Cpu` or `Cuda(0)`.
    "to_device"(input; device) Nothing: |call| {
        let x = call.tensor(0)?;
        let device = match &call.get::<String>("device")?[..] {
            "Cpu" => Device::Cpu,
            text => match text.strip_prefix("Cuda(").and_then(|rest| rest.strip_suffix(')')?.parse().ok()) {
                Some(index) => Device::Cuda(index),
                None => return call.refuse(format!("device = \"{text}\"; expected Cpu or Cuda(number)")),
            },
        };
        Ok::<_, Error>(Convert::to_device(x, device)?)
    };
    /// The tensor with contiguous shards.
    "contiguous"(input) Nothing: |call| Convert::contiguous(call.tensor(0)?);
    /// −x.
    "neg"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Neg);
    /// |x|.
    "abs"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Abs);
    /// x².
    "square"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Square);
    /// √x.
    "sqrt"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Sqrt);
    /// 1/√x.
    "rsqrt"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Rsqrt);
    /// 1/x.
    "reciprocal"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Reciprocal);
    /// eˣ.
    "exp"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Exp);
    /// ln x.
    "log"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Log);
    /// sin x.
    "sin"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Sin);
    /// cos x.
    "cos"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Cos);
    /// tanh x.
    "tanh"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Tanh);
    /// σ(x) = 1 / (1 + e⁻ˣ).
    "sigmoid"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Sigmoid);
    /// ln σ(x).
    "logsigmoid"(input) Nothing: |call| call.tensor(0)?.unary(Unary::LogSigmoid);
    /// max(x, 0).
    "relu"(input;; inplace) Nothing: |call| activation(call, Unary::Relu);
    /// x, or α · (eˣ − 1) below 0 (`alpha`, 1 if not given).
    "elu"(input: Floating;; alpha, inplace) Nothing: |call| parameterised::elu(call);
    /// x, or α · (exp(x / α) − 1) below 0 (`alpha`, 1 if not given).
    "celu"(input: Floating;; alpha, inplace) Nothing: |call| parameterised::celu(call);
    /// 1.0507… · (x, or 1.6732… · (eˣ − 1) below 0).
    "selu"(input;; inplace) Nothing: |call| activation(call, Unary::Selu);
    /// x · σ(x).
    "silu"(input;; inplace) Nothing: |call| activation(call, Unary::Silu);
    /// ln(1 + exp(β x)) / β (`beta`, 1 if not given), or x where β x is above `threshold` (20 if not given).
    "softplus"(input: Floating;; beta, threshold) Nothing: |call| parameterised::softplus(call);
    /// x / (1 + |x|).
    "softsign"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Softsign);
    /// x − tanh x.
    "tanhshrink"(input) Nothing: |call| call.tensor(0)?.unary(Unary::Tanhshrink);
    /// x, or `negative_slope` · x below 0.
    "leaky_relu"(input; negative_slope; inplace) Nothing:
        |call| activation(call, Unary::LeakyRelu(call.or("negative_slope", 0.01)?));
    /// x · Φ(x), exact or by tanh (`approximate`).
    "gelu"(input; approximate) Nothing: |call| gelu(call);
    /// x moved towards 0 by `lambd`, and 0 where it was nearer.
    "softshrink"(input; lambd) Nothing:
        |call| call.tensor(0)?.unary(Unary::Softshrink(call.or("lambd", 0.5)?));
    /// x where it is above `threshold`, else `value`.
    "threshold"(input; threshold, value; inplace) Nothing: |call| {
        let (threshold, value) = (call.number("threshold")?, call.number("value")?);
        activation(call, Unary::Threshold { threshold, value })
    };
    /// x cut to the interval from `min` to `max`.
    "clamp"(input; min, max) Nothing: |call| clamp(call);
    /// a + α b (`alpha`, 1 if not given); b is a tensor, or the number `other`.
    "add"(input, other;; other, alpha) SmallerOperands:
        |call| sum(call, Binary::Add);
    /// a − α b (`alpha`, 1 if not given); b is a tensor, or the number `other`.
    "sub"(input: NotBool, other: NotBool;; other, alpha) SmallerOperands:
        |call| sum(call, Binary::Sub);
    /// a · b; b is a tensor, or the number `other`.
    "mul"(input, other;; other) SmallerOperands:
        |call| mul(call);
    /// a / b; b is a tensor, or the number `other`.
    "div"(input, other;; other) SmallerOperands:
        |call| binary(call, Binary::Div, || Ok(Unary::MulScalar(1.0 / call.number("other")?)));
    /// aᵇ; b is a tensor, or the number `exponent`.
    "pow"(input, exponent: NotBothBool;; exponent) SmallerOperands:
        |call| pow(call);
    /// The greater of two numbers.
    "maximum"(input: NotComplex, other: NotComplex) SmallerOperands: |call| call.tensor(0)?.binary(Binary::Maximum, call.tensor(1)?);
    /// The lesser of two numbers.
    "minimum"(input: NotComplex, other: NotComplex) SmallerOperands: |call| call.tensor(0)?.binary(Binary::Minimum, call.tensor(1)?);
    /// True where a = b.
    "eq"(input, other) SmallerOperands: |call| call.tensor(0)?.compare(Comparison::Eq, call.tensor(1)?);
    /// True where a ≠ b.
    "ne"(input, other) SmallerOperands: |call| call.tensor(0)?.compare(Comparison::Ne, call.tensor(1)?);
    /// True where a < b.
    "lt"(input: NotComplex, other: NotComplex) SmallerOperands: |call| call.tensor(0)?.compare(Comparison::Lt, call.tensor(1)?);
    /// True where a ≤ b.
    "le"(input: NotComplex, other: NotComplex) SmallerOperands: |call| call.tensor(0)?.compare(Comparison::Le, call.tensor(1)?);
    /// True where a > b.
    "gt"(input: NotComplex, other: NotComplex) SmallerOperands: |call| call.tensor(0)?.compare(Comparison::Gt, call.tensor(1)?);
    /// True where a ≥ b.
    "ge"(input: NotComplex, other: NotComplex) SmallerOperands: |call| call.tensor(0)?.compare(Comparison::Ge, call.tensor(1)?);
    /// `input` where `condition` is true, else `other`.
    "where"(condition: Condition, input, other) SmallerOperands:
        |call| call.tensor(0)?.select_where(call.tensor(1)?, call.tensor(2)?);
    /// x, or `weight` · x below 0.
    "prelu"(input: Floating, weight: Operand) SmallerOperands: |call| Elementwise::prelu(call.tensor(0)?, call.tensor(1)?);
    /// `value` where `mask` is true, else x.
    "masked_fill"(input, mask: Bool; value) SmallerOperands:
        |call| call.tensor(0)?.masked_fill(call.tensor(1)?, call.number("value")?);
}

fn gelu(call: &Call<'_>) -> Result<ShardTensor> {
    let function = match &call.word("approximate", "none")?[..] {
        "none" => Unary::Gelu,
        "tanh" => Unary::GeluTanh,
        other => return call.refuse(format!("approximate = \"{other}\"; expected none or tanh")),
    };
    Ok(call.tensor(0)?.unary(function)?)
}

/// A function whose result is a new tensor.
fn activation(call: &Call<'_>, function: Unary) -> Result<ShardTensor> {
    call.only("inplace", false)?;
    Ok(call.tensor(0)?.unary(function)?)
}

/// A sum or difference, of which the second operand has the factor α.
fn sum(call: &Call<'_>, function: Binary) -> Result<ShardTensor> {
    let x = call.tensor(0)?;
    if let Some(other) = call.tensor_or_number(1)? {
        return x.binary(function, &parameterised::times_alpha(call, x, other)?);
    }
    let alpha = if call.has("alpha")? { whole_number(call, "alpha")? } else { Some(1) };
    let subtracts = function == Binary::Sub;
    if let (Some(alpha), Some(other)) = (alpha, whole_number(call, "other")?) {
        let c = alpha.saturating_mul(other);
        let f = |x: &Tensor| if subtracts { x.f_sub_scalar(c) } else { x.f_add_scalar(c) };
        return by_integer(call, function.name(), c, f);
    }
    let c = call.or("alpha", 1.0)? * call.number("other")?;
    Ok(x.unary(Unary::AddScalar(if subtracts { -c } else { c }))?)
}

fn mul(call: &Call<'_>) -> Result<ShardTensor> {
    match whole_number(call, "other")? {
        Some(c) if call.tensor_or_number(1)?.is_none() => mul_integer(call, c),
        _ => binary(call, Binary::Mul, || Ok(Unary::MulScalar(call.number("other")?))),
    }
}

/// Multiplies the first tensor by the integer `c`. Partial sums stay partial: sums of integers are linear, even if they overflow.
fn mul_integer(call: &Call<'_>, c: i64) -> Result<ShardTensor> {
    let x = call.tensor(0)?;
    let is_sum = |placement: &Placement| *placement == Placement::Partial(ReduceOp::Sum);
    let sums = x.placements().iter().all(|placement| !placement.is_partial() || is_sum(placement));
    // Sums of booleans are "or", which is not linear.
    if !sums || x.kind() == Kind::Bool {
        return by_integer(call, "mul", c, |x| x.f_mul_scalar(c));
    }
    check_number("mul", c as f64, x.kind())?;
    operator("mul", &[x], args!("other": c), || {
        Ok(ShardTensor::new(torch("mul", x.local().f_mul_scalar(c))?, x.layout().clone()))
    })
}

fn pow(call: &Call<'_>) -> Result<ShardTensor> {
    match whole_number(call, "exponent")? {
        Some(c) if call.tensor_or_number(1)?.is_none() => match c < 0 {
            true => call
                .refuse(format!("\"exponent\" is {c} for integers; expected 0 or more, or a floating dtype")),
            false => {
                let x = call.tensor(0)?;
                check_number("pow", c as f64, x.kind())?;
                x.map("pow", args!("exponent": c), |x| x.f_pow_tensor_scalar(c))
            }
        },
        _ => binary(call, Binary::Pow, || Ok(Unary::PowScalar(call.number("exponent")?))),
    }
}

fn clamp(call: &Call<'_>) -> Result<ShardTensor> {
    let x = call.tensor(0)?;
    let bound = |name| -> Result<_> { Ok((call.has(name)?, whole_number(call, name)?)) };
    let (min, max) = (bound("min")?, bound("max")?);
    // Both bounds that are given are integers, and one is given.
    if x.kind() != Kind::Bool && min.0 == min.1.is_some() && max.0 == max.1.is_some() && (min.0 || max.0) {
        let (min, max) = (min.1, max.1);
        min.into_iter().chain(max).try_for_each(|bound| check_number("clamp", bound as f64, x.kind()))?;
        return x.map("clamp", args!("min": min, "max": max), |x| {
            let x = min.map_or_else(|| Ok(x.shallow_clone()), |min| x.f_clamp_min(min))?;
            max.map_or_else(|| Ok(x.shallow_clone()), |max| x.f_clamp_max(max))
        });
    }
    let min = call.optional_number("min")?.unwrap_or(f64::NEG_INFINITY);
    let max = call.optional_number("max")?.unwrap_or(f64::INFINITY);
    Ok(x.unary(Unary::Clamp { min, max })?)
}

/// Returns the argument `name` if it and the first tensor's elements are integers, whose results are then integers, too.
fn whole_number(call: &Call<'_>, name: &str) -> Result<Option<i64>> {
    let integers = [Kind::Bool, Kind::Uint8, Kind::Int8, Kind::Int16, Kind::Int, Kind::Int64];
    if !integers.contains(&call.tensor(0)?.kind()) {
        return Ok(None);
    }
    Ok(call.optional::<Value>(name)?.and_then(|value| value.as_i64()))
}

/// A linear function of each element of the first tensor and the integer `c`.
fn by_integer(
    call: &Call<'_>,
    op: &'static str,
    c: i64,
    f: impl FnOnce(&Tensor) -> Result<Tensor, TchError>,
) -> Result<ShardTensor> {
    let x = call.tensor(0)?;
    check_number(op, c as f64, x.kind())?;
    x.map(op, args!("other": c), f)
}

/// A function of two tensors, or of one and a number.
fn binary(
    call: &Call<'_>,
    function: Binary,
    of_number: impl FnOnce() -> Result<Unary>,
) -> Result<ShardTensor> {
    let x = call.tensor(0)?;
    match call.tensor_or_number(1)? {
        Some(other) => x.binary(function, other),
        None => Ok(x.unary(of_number()?)?),
    }
}
