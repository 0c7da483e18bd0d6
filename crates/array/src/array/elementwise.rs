//! Functions of each element.

use tch::{Scalar, Tensor};

use super::by_name::one;
use super::{Array, Attrs, named, number};
use crate::error::Result;

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Unary {
    /// −x
    Neg,
    /// |x|
    Abs,
    /// x²
    Square,
    /// √x
    Sqrt,
    /// 1/√x
    Rsqrt,
    /// 1/x
    Reciprocal,
    /// eˣ
    Exp,
    /// ln x
    Log,
    /// sin x
    Sin,
    /// cos x
    Cos,
    /// tanh x
    Tanh,
    /// σ(x) = 1 / (1 + e⁻ˣ)
    Sigmoid,
    /// ln σ(x)
    LogSigmoid,
    /// max(x, 0)
    Relu,
    /// x, or this slope times x below 0
    LeakyRelu(f64),
    /// x, or eˣ − 1 below 0
    Elu,
    /// x, or eˣ − 1 below 0 (α = 1, where it is [`Elu`](Unary::Elu))
    Celu,
    /// 1.0507… · (x, or 1.6732… · (eˣ − 1) below 0)
    Selu,
    /// x · σ(x)
    Silu,
    /// x · Φ(x), the exact form with erf
    Gelu,
    /// x · Φ(x) by tanh
    GeluTanh,
    /// ln(1 + eˣ)
    Softplus,
    /// x / (1 + |x|)
    Softsign,
    /// x moved towards 0 by this much, and 0 where it was nearer
    Softshrink(f64),
    /// x − tanh x
    Tanhshrink,
    /// x where it is above `threshold`, else `value`
    Threshold {
        /// The border.
        threshold: f64,
        /// Value at and below it.
        value: f64,
    },
    /// x cut to an interval
    Clamp {
        /// The least result.
        min: f64,
        /// The greatest result.
        max: f64,
    },
    /// x + c
    AddScalar(f64),
    /// x · c
    MulScalar(f64),
    /// xᶜ
    PowScalar(f64),
}

/// A function of two numbers, over broadcast shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Binary {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a · b
    Mul,
    /// a / b
    Div,
    /// The greater one.
    Maximum,
    /// The lesser one.
    Minimum,
    /// aᵇ
    Pow,
}

impl Unary {
    /// Those without arguments.
    pub const PLAIN: [Self; 21] = [
        Self::Neg,
        Self::Abs,
        Self::Square,
        Self::Sqrt,
        Self::Rsqrt,
        Self::Reciprocal,
        Self::Exp,
        Self::Log,
        Self::Sin,
        Self::Cos,
        Self::Tanh,
        Self::Sigmoid,
        Self::LogSigmoid,
        Self::Relu,
        Self::Elu,
        Self::Celu,
        Self::Selu,
        Self::Silu,
        Self::Softplus,
        Self::Softsign,
        Self::Tanhshrink,
    ];

    /// PyTorch's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Neg => "neg",
            Self::Abs => "abs",
            Self::Square => "square",
            Self::Sqrt => "sqrt",
            Self::Rsqrt => "rsqrt",
            Self::Reciprocal => "reciprocal",
            Self::Exp => "exp",
            Self::Log => "log",
            Self::Sin => "sin",
            Self::Cos => "cos",
            Self::Tanh => "tanh",
            Self::Sigmoid => "sigmoid",
            Self::LogSigmoid => "logsigmoid",
            Self::Relu => "relu",
            Self::LeakyRelu(_) => "leaky_relu",
            Self::Elu => "elu",
            Self::Celu => "celu",
            Self::Selu => "selu",
            Self::Silu => "silu",
            Self::Gelu | Self::GeluTanh => "gelu",
            Self::Softplus => "softplus",
            Self::Softsign => "softsign",
            Self::Softshrink(_) => "softshrink",
            Self::Tanhshrink => "tanhshrink",
            Self::Threshold { .. } => "threshold",
            Self::Clamp { .. } => "clamp",
            Self::AddScalar(_) => "add",
            Self::MulScalar(_) => "mul",
            Self::PowScalar(_) => "pow",
        }
    }
}

impl Binary {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Add, Self::Sub, Self::Mul, Self::Div, Self::Maximum, Self::Minimum, Self::Pow];

    /// PyTorch's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Sub => "sub",
            Self::Mul => "mul",
            Self::Div => "div",
            Self::Maximum => "maximum",
            Self::Minimum => "minimum",
            Self::Pow => "pow",
        }
    }
}

/// Functions of each element.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: kinds that the function lacks, shapes that do not broadcast"
)]
pub trait Elementwise: Sized {
    /// `function` of every element.
    fn unary(&self, function: Unary) -> Result<Self>;

    /// `function` of the elements of both, whose shapes are broadcast to each other.
    fn binary(&self, function: Binary, other: &Self) -> Result<Self>;

    /// The elements of `on_true` where this boolean array is true, else those of `on_false`.
    fn select_where(&self, on_true: &Self, on_false: &Self) -> Result<Self>;

    /// x, or weight · x below 0, with one weight or one for each channel (dim 1).
    fn prelu(&self, weight: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one("prelu", &[self, weight], args!())
    }

    /// The comparison of the elements of both, whose shapes are broadcast to each other; booleans.
    fn compare(&self, comparison: Comparison, other: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one(comparison.name(), &[self, other], args!())
    }

    /// `value` where `mask`, a boolean array that is broadcast to this one's shape, is true.
    fn masked_fill(&self, mask: &Self, value: f64) -> Result<Self>
    where
        Self: Array,
    {
        one("masked_fill", &[self, mask], args!("value": number(value)))
    }

    /// The sum.
    fn add(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Add, other)
    }

    /// The difference.
    fn sub(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Sub, other)
    }

    /// The product.
    fn mul(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Mul, other)
    }

    /// The quotient.
    fn div(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Div, other)
    }

    /// x + c
    fn add_scalar(&self, c: f64) -> Result<Self> {
        self.unary(Unary::AddScalar(c))
    }

    /// x · c
    fn mul_scalar(&self, c: f64) -> Result<Self> {
        self.unary(Unary::MulScalar(c))
    }

    /// max(x, 0)
    fn relu(&self) -> Result<Self> {
        self.unary(Unary::Relu)
    }

    /// x · Φ(x), exact.
    fn gelu(&self) -> Result<Self> {
        self.unary(Unary::Gelu)
    }

    /// tanh x
    fn tanh(&self) -> Result<Self> {
        self.unary(Unary::Tanh)
    }

    /// x moved towards 0 by `lambda`, and 0 where it was nearer.
    fn softshrink(&self, lambda: f64) -> Result<Self> {
        self.unary(Unary::Softshrink(lambda))
    }
}

impl Elementwise for Tensor {
    fn unary(&self, function: Unary) -> Result<Self> {
        use Unary::*;
        let x = self;
        let result = match function {
            Neg => x.f_neg(),
            Abs => x.f_abs(),
            Square => x.f_square(),
            Sqrt => x.f_sqrt(),
            Rsqrt => x.f_rsqrt(),
            Reciprocal => x.f_reciprocal(),
            Exp => x.f_exp(),
            Log => x.f_log(),
            Sin => x.f_sin(),
            Cos => x.f_cos(),
            Tanh => x.f_tanh(),
            Sigmoid => x.f_sigmoid(),
            LogSigmoid => x.f_log_sigmoid(),
            Relu => x.f_relu(),
            // max(x, s·x), and for slopes above 1 the other one.
            LeakyRelu(slope) => leaky_relu(x, slope),
            Elu => x.f_elu(),
            Celu => x.f_celu(),
            Selu => x.f_selu(),
            Silu => x.f_silu(),
            Gelu => x.f_gelu("none"),
            GeluTanh => x.f_gelu("tanh"),
            Softplus => x.f_softplus(),
            Softsign => x.f_abs().and_then(|a| a.f_add_scalar(1.0)).and_then(|a| x.f_div(&a)),
            Softshrink(lambda) => x.f_clamp(-lambda, lambda).and_then(|inner| x.f_sub(&inner)),
            Tanhshrink => x.f_tanh().and_then(|t| x.f_sub(&t)),
            Threshold { threshold, value } => x.f_threshold(threshold, value),
            Clamp { min, max } => x.f_clamp(min, max),
            AddScalar(c) => x.f_add_scalar(c),
            MulScalar(c) => x.f_mul_scalar(c),
            PowScalar(c) => x.f_pow_tensor_scalar(c),
        };
        named(function.name(), &[self], result)
    }

    fn binary(&self, function: Binary, other: &Self) -> Result<Self> {
        let result = match function {
            Binary::Add => self.f_add(other),
            Binary::Sub => self.f_sub(other),
            Binary::Mul => self.f_mul(other),
            Binary::Div => self.f_div(other),
            Binary::Maximum => self.f_maximum(other),
            Binary::Minimum => self.f_minimum(other),
            Binary::Pow => self.f_pow(other),
        };
        named(function.name(), &[self, other], result)
    }

    fn select_where(&self, on_true: &Self, on_false: &Self) -> Result<Self> {
        named("where", &[self, on_true, on_false], on_true.f_where_self(self, on_false))
    }

    fn prelu(&self, weight: &Self) -> Result<Self> {
        named("prelu", &[self, weight], self.f_prelu(weight))
    }

    fn compare(&self, comparison: Comparison, other: &Self) -> Result<Self> {
        let result = match comparison {
            Comparison::Eq => self.f_eq_tensor(other),
            Comparison::Ne => self.f_ne_tensor(other),
            Comparison::Lt => self.f_lt_tensor(other),
            Comparison::Le => self.f_le_tensor(other),
            Comparison::Gt => self.f_gt_tensor(other),
            Comparison::Ge => self.f_ge_tensor(other),
        };
        named(comparison.name(), &[self, other], result)
    }

    fn masked_fill(&self, mask: &Self, value: f64) -> Result<Self> {
        named("masked_fill", &[self, mask], self.f_masked_fill(mask, value))
    }
}

/// libtorch's own has no slope in tch. The gradient at 0 is the slope, as there.
fn leaky_relu(x: &Tensor, slope: f64) -> Result<Tensor, tch::TchError> {
    let slope = x.f_mul_scalar(Scalar::from(slope))?;
    x.f_where_self(&x.f_gt(0.0)?, &slope)
}

impl Unary {
    /// Returns the arguments by PyTorch's names.
    pub fn args(self) -> Attrs {
        match self {
            Self::LeakyRelu(slope) => args!("negative_slope": slope)(),
            Self::Gelu => args!("approximate": "none")(),
            Self::GeluTanh => args!("approximate": "tanh")(),
            Self::Softshrink(lambda) => args!("lambd": lambda)(),
            Self::Threshold { threshold, value } => {
                args!("threshold": number(threshold), "value": number(value))()
            }
            Self::Clamp { min, max } => args!("min": number(min), "max": number(max))(),
            Self::AddScalar(c) | Self::MulScalar(c) => args!("other": number(c))(),
            Self::PowScalar(c) => args!("exponent": number(c))(),
            _ => Attrs::new(),
        }
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

impl Comparison {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Eq, Self::Ne, Self::Lt, Self::Le, Self::Gt, Self::Ge];

    /// PyTorch's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eq => "eq",
            Self::Ne => "ne",
            Self::Lt => "lt",
            Self::Le => "le",
            Self::Gt => "gt",
            Self::Ge => "ge",
        }
    }
}
