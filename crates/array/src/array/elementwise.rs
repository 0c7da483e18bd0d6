//! Functions of each element.

use tch::Tensor;

use super::by_name::one;
use super::{Array, Attrs, named, number};
use crate::dtypes::{Dtype, check_dtypes, check_number, is_floating};
use crate::error::Result;
use crate::precision::full;

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

    /// Returns true if mixed precision computes it in single precision, as libtorch's autocast does on CUDA.
    const fn is_in_full(self) -> bool {
        matches!(
            self,
            Self::Exp | Self::Log | Self::Reciprocal | Self::Rsqrt | Self::Softplus | Self::PowScalar(_)
        )
    }

    /// The dtypes that it takes.
    const fn dtype(self) -> Dtype {
        match self {
            Self::Neg | Self::Abs | Self::Softsign | Self::Tanhshrink => Dtype::NotBool,
            Self::Relu | Self::Softshrink(_) | Self::Threshold { .. } => Dtype::Real,
            Self::Clamp { .. } => Dtype::NotComplex,
            Self::Silu => Dtype::FloatingOrComplex,
            Self::LogSigmoid
            | Self::LeakyRelu(_)
            | Self::Elu
            | Self::Celu
            | Self::Selu
            | Self::Gelu
            | Self::GeluTanh
            | Self::Softplus => Dtype::Floating,
            Self::Square
            | Self::Sqrt
            | Self::Rsqrt
            | Self::Reciprocal
            | Self::Exp
            | Self::Log
            | Self::Sin
            | Self::Cos
            | Self::Tanh
            | Self::Sigmoid
            | Self::AddScalar(_)
            | Self::MulScalar(_)
            | Self::PowScalar(_) => Dtype::Any,
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
///
/// # Errors
///
/// All methods fail on a dtype that the function does not take and on shapes that do not broadcast; on sharded arrays also if an
/// exchange fails.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: kinds that the function lacks, shapes that do not broadcast"
)]
pub trait Elementwise: Sized {
    /// `function` of every element.
    ///
    /// ```
    /// use isobar_array::{Elementwise, Unary};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[-2.0, 0.5, 4.0]);
    /// assert_eq!(x.unary(Unary::Square)?, Tensor::from_slice(&[4.0, 0.25, 16.0]));
    /// assert_eq!(x.unary(Unary::Clamp { min: 0.0, max: 1.0 })?, Tensor::from_slice(&[0.0, 0.5, 1.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn unary(&self, function: Unary) -> Result<Self>;

    /// `function` of the elements of both, whose shapes are broadcast to each other.
    ///
    /// ```
    /// use isobar_array::{Binary, Elementwise};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 5.0], [4.0, 2.0]]);
    /// let y = x.binary(Binary::Maximum, &Tensor::from_slice(&[3.0, 3.0]))?;
    /// assert_eq!(y, Tensor::from_slice2(&[[3.0, 5.0], [4.0, 3.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn binary(&self, function: Binary, other: &Self) -> Result<Self>;

    /// The elements of `on_true` where this boolean array is true, else those of `on_false`.
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let sea = Tensor::from_slice(&[true, false, true]);
    /// let y = sea.select_where(&Tensor::from_slice(&[1.0, 2.0, 3.0]), &Tensor::from_slice(&[0.0]))?;
    /// assert_eq!(y, Tensor::from_slice(&[1.0, 0.0, 3.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn select_where(&self, on_true: &Self, on_false: &Self) -> Result<Self>;

    /// x, or weight · x below 0, with one weight or one for each channel (dim 1).
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[-4.0, -4.0], [1.0, 2.0]]);
    /// let y = Elementwise::prelu(&x, &Tensor::from_slice(&[0.25, 0.5]))?;
    /// assert_eq!(y, Tensor::from_slice2(&[[-1.0, -2.0], [1.0, 2.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn prelu(&self, weight: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one("prelu", &[self, weight], args!())
    }

    /// The comparison of the elements of both, whose shapes are broadcast to each other; booleans.
    ///
    /// ```
    /// use isobar_array::{Comparison, Elementwise};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0]);
    /// let above = x.compare(Comparison::Gt, &Tensor::from_slice(&[1.5]))?;
    /// assert_eq!(above, Tensor::from_slice(&[false, true, true]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn compare(&self, comparison: Comparison, other: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one(comparison.name(), &[self, other], args!())
    }

    /// `value` where `mask`, a boolean array that is broadcast to this one's shape, is true.
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// let y = Elementwise::masked_fill(&x, &Tensor::from_slice(&[false, true]), 0.0)?;
    /// assert_eq!(y, Tensor::from_slice2(&[[1.0, 0.0], [3.0, 0.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn masked_fill(&self, mask: &Self, value: f64) -> Result<Self>
    where
        Self: Array,
    {
        one("masked_fill", &[self, mask], args!("value": number(value)))
    }

    /// The sum.
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// let y = x.add(&Tensor::from_slice(&[10.0, 20.0]))?;
    /// assert_eq!(y, Tensor::from_slice2(&[[11.0, 22.0], [13.0, 24.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn add(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Add, other)
    }

    /// The difference.
    ///
    /// ```
    /// use isobar_array::{Elementwise, Reduce, Statistic};
    /// use tch::Tensor;
    ///
    /// // Deviations from the mean of each row.
    /// let x = Tensor::from_slice2(&[[1.0, 3.0], [4.0, 8.0]]);
    /// let mean = x.statistic(Statistic::Mean, &[1], true)?;
    /// assert_eq!(x.sub(&mean)?, Tensor::from_slice2(&[[-1.0, 1.0], [-2.0, 2.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn sub(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Sub, other)
    }

    /// The product.
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let (rows, columns) = (Tensor::from_slice2(&[[1.0], [2.0]]), Tensor::from_slice(&[3.0, 4.0]));
    /// assert_eq!(rows.mul(&columns)?, Tensor::from_slice2(&[[3.0, 4.0], [6.0, 8.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn mul(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Mul, other)
    }

    /// The quotient.
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, -2.0, 3.0]);
    /// assert_eq!(x.div(&Tensor::from_slice(&[4.0]))?, Tensor::from_slice(&[0.25, -0.5, 0.75]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn div(&self, other: &Self) -> Result<Self> {
        self.binary(Binary::Div, other)
    }

    /// x + c
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// // From degrees Celsius to kelvin.
    /// let celsius = Tensor::from_slice(&[0.0, 20.0]);
    /// assert_eq!(celsius.add_scalar(273.15)?, Tensor::from_slice(&[273.15, 293.15]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn add_scalar(&self, c: f64) -> Result<Self> {
        self.unary(Unary::AddScalar(c))
    }

    /// x · c
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, -2.0]);
    /// assert_eq!(x.mul_scalar(0.5)?, Tensor::from_slice(&[0.5, -1.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn mul_scalar(&self, c: f64) -> Result<Self> {
        self.unary(Unary::MulScalar(c))
    }

    /// max(x, 0)
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[-1.0, 0.0, 2.0]);
    /// assert_eq!(Elementwise::relu(&x)?, Tensor::from_slice(&[0.0, 0.0, 2.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn relu(&self) -> Result<Self> {
        self.unary(Unary::Relu)
    }

    /// x · Φ(x), exact.
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let y = Elementwise::gelu(&Tensor::from_slice(&[-10.0, 0.0, 1.0, 10.0]))?;
    /// assert!(y.allclose(&Tensor::from_slice(&[0.0, 0.0, 0.841345, 10.0]), 1e-5, 1e-6, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn gelu(&self) -> Result<Self> {
        self.unary(Unary::Gelu)
    }

    /// tanh x
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let y = Elementwise::tanh(&Tensor::from_slice(&[-50.0, 0.0, 50.0]))?;
    /// assert_eq!(y, Tensor::from_slice(&[-1.0, 0.0, 1.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn tanh(&self) -> Result<Self> {
        self.unary(Unary::Tanh)
    }

    /// x moved towards 0 by `lambda`, and 0 where it was nearer.
    ///
    /// ```
    /// use isobar_array::Elementwise;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[-2.0, 0.25, 1.5]);
    /// assert_eq!(Elementwise::softshrink(&x, 0.5)?, Tensor::from_slice(&[-1.5, 0.0, 1.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn softshrink(&self, lambda: f64) -> Result<Self> {
        self.unary(Unary::Softshrink(lambda))
    }
}

impl Elementwise for Tensor {
    fn unary(&self, function: Unary) -> Result<Self> {
        use Unary::*;
        let (name, kind) = (function.name(), self.kind());
        check_dtypes(name, [("input", kind, function.dtype())], Tensor::device(self))?;
        let numbers = match function {
            Threshold { threshold, value } => [threshold, value],
            // Of integers, libtorch computes these in a floating dtype.
            Clamp { min, max } if is_floating(kind) => [min, max],
            Softshrink(lambda) if is_floating(kind) => [-lambda, lambda],
            _ => [0.0; 2],
        };
        numbers.into_iter().try_for_each(|number| check_number(name, number, kind))?;
        let in_full;
        let x = if function.is_in_full() {
            in_full = named(name, &[self], full(self))?;
            &in_full
        } else {
            self
        };
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
        named(name, &[self], result)
    }

    fn binary(&self, function: Binary, other: &Self) -> Result<Self> {
        let result = match function {
            Binary::Add => self.f_add(other),
            Binary::Sub => self.f_sub(other),
            Binary::Mul => self.f_mul(other),
            Binary::Div => self.f_div(other),
            Binary::Maximum => self.f_maximum(other),
            Binary::Minimum => self.f_minimum(other),
            Binary::Pow => full(self).and_then(|x| x.f_pow(&full(other)?)),
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
        let tensors = [("input", self.kind(), Dtype::Any), ("mask", mask.kind(), Dtype::Bool)];
        check_dtypes("masked_fill", tensors, Tensor::device(self))?;
        check_number("masked_fill", value, self.kind())?;
        // tch panics if a call with a scalar argument fails, so shapes that do not broadcast must fail first.
        named("masked_fill", &[self, mask], Tensor::f_broadcast_tensors(&[self, mask]))?;
        named("masked_fill", &[self, mask], self.f_masked_fill(mask, value))
    }
}

/// Computes x, or `slope` · x below 0, with the kernel of leaky ReLU's gradient: tch's `leaky_relu` takes no slope. That kernel
/// returns its first tensor where the second is above 0, and `slope` times the first elsewhere. Its own gradient does the same;
/// at 0 it is `slope`, as in PyTorch.
fn leaky_relu(x: &Tensor, slope: f64) -> Result<Tensor, tch::TchError> {
    x.f_detach()?.f_leaky_relu_backward(x, slope, false)
}

impl Unary {
    /// Returns the arguments by PyTorch's names.
    ///
    /// ```
    /// use isobar_array::Unary;
    ///
    /// let function = Unary::LeakyRelu(0.5);
    /// assert_eq!(function.name(), "leaky_relu");
    /// assert_eq!(function.args()["negative_slope"], 0.5);
    /// ```
    pub fn args(self) -> Attrs {
        match self {
            Self::LeakyRelu(slope) => args!("negative_slope": number(slope))(),
            Self::Gelu => args!("approximate": "none")(),
            Self::GeluTanh => args!("approximate": "tanh")(),
            Self::Softshrink(lambda) => args!("lambd": number(lambda))(),
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
