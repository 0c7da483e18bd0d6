//! Dtypes that operators take. Dense and sharded operators reject other dtypes by this table before they call libtorch, whose
//! kernels accept any dtype on an empty shard.

use tch::{Device, Kind};

use crate::error::{Result, argument};
use crate::precision::lowered_kind;

/// A set of dtypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dtypes {
    Any,
    Bool,
    /// The dtypes of conditions.
    BoolOrUint8,
    /// The dtypes of indices.
    Index,
    Floating,
    FloatingOrComplex,
    /// Integers and floating dtypes.
    Real,
    /// All but complex dtypes.
    NotComplex,
    /// All but `Bool`.
    NotBool,
    /// The floating dtypes and the one of images.
    FloatingOrUint8,
    /// The floating dtypes and the one of counts.
    FloatingOrInt64,
}

impl Dtypes {
    fn has(self, kind: Kind) -> bool {
        let (floating, complex) = (is_floating(kind), is_complex(kind));
        match self {
            Self::Any => true,
            Self::Bool => kind == Kind::Bool,
            Self::BoolOrUint8 => matches!(kind, Kind::Bool | Kind::Uint8),
            Self::Index => matches!(kind, Kind::Int | Kind::Int64),
            Self::Floating => floating,
            Self::FloatingOrComplex => floating || complex,
            Self::Real => !complex && kind != Kind::Bool,
            Self::NotComplex => !complex,
            Self::NotBool => kind != Kind::Bool,
            Self::FloatingOrUint8 => floating || kind == Kind::Uint8,
            Self::FloatingOrInt64 => floating || kind == Kind::Int64,
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Any => "any dtype",
            Self::Bool => "Bool",
            Self::BoolOrUint8 => "Bool",
            Self::Index => "Int64 or Int",
            Self::Floating => "a floating dtype",
            Self::FloatingOrComplex => "a floating or complex dtype",
            Self::Real => "an integer or floating dtype",
            Self::NotComplex => "a dtype that is not complex",
            Self::NotBool => "an integer, floating or complex dtype",
            Self::FloatingOrUint8 => "a floating dtype or Uint8",
            Self::FloatingOrInt64 => "a floating dtype or Int64",
        }
    }
}

/// Dtypes of the tensors after the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Others {
    /// Any, as libtorch promotes them.
    Free,
    /// The dtype of the first.
    Alike,
    /// The second and the third like the first, those after them of any dtype.
    NextTwoAlike,
    /// Any but `Bool` after `Bool`.
    NotBothBool,
    /// The dtype of the first, or `Float` beside 16 bits: parameters of norms.
    Parameters,
    /// The second of this set, those after it of any dtype.
    Second(Dtypes),
    /// The second of this set, those after it of the dtype of the first.
    SecondThenAlike(Dtypes),
}

/// The dtypes of an operator's tensors.
fn dtypes(op: &str) -> (Dtypes, Others) {
    use Dtypes::*;
    use Others::*;
    match op {
        "abs" | "neg" | "softsign" | "tanhshrink" => (NotBool, Free),
        "relu" | "softshrink" | "threshold" | "topk" => (Real, Free),
        "clamp" | "amax" | "amin" | "sort" => (NotComplex, Free),
        "elu" | "celu" | "selu" | "gelu" | "leaky_relu" | "logsigmoid" | "softplus" => (Floating, Free),
        "silu" | "mean" | "norm" | "var" | "std" | "requires_grad" => (FloatingOrComplex, Free),
        "softmax" | "log_softmax" => (Floating, Free),
        "sub" => (NotBool, Second(NotBool)),
        "pow" => (Any, NotBothBool),
        "lt" | "le" | "gt" | "ge" | "maximum" | "minimum" => (NotComplex, Second(NotComplex)),
        "conv1d" | "conv2d" | "conv3d" => (Real, Alike),
        "conv_transpose1d" | "conv_transpose2d" | "conv_transpose3d" => (FloatingOrInt64, Alike),
        "linear" | "matmul" | "bmm" | "einsum" => (NotBool, Alike),
        "layer_norm" | "group_norm" | "instance_norm" | "batch_norm" => (Floating, Parameters),
        "scaled_dot_product_attention" => (Floating, NextTwoAlike),
        "mse_loss" => (Floating, Second(Floating)),
        "cdist" | "prelu" | "grid_sample" => (Floating, Alike),
        "max_pool1d" | "max_pool2d" | "max_pool3d" => (Real, Free),
        "avg_pool1d" | "avg_pool2d" | "avg_pool3d" => (FloatingOrInt64, Free),
        "adaptive_avg_pool1d" | "adaptive_avg_pool2d" | "adaptive_avg_pool3d" => (Floating, Free),
        "adaptive_max_pool1d" | "adaptive_max_pool2d" | "adaptive_max_pool3d" => (Floating, Free),
        "interpolate" => (FloatingOrUint8, Free),
        "where" => (BoolOrUint8, Free),
        "masked_fill" => (Any, Second(Bool)),
        "index_select" | "gather" => (Any, Second(Index)),
        "embedding" => (Index, Free),
        "index_add" | "scatter_add" => (Any, SecondThenAlike(Index)),
        _ => (Any, Free),
    }
}

/// Returns whether mixed precision converts the operands to one dtype.
fn is_lowered(op: &str) -> bool {
    op.starts_with("conv")
        || matches!(op, "linear" | "matmul" | "bmm" | "einsum" | "scaled_dot_product_attention")
        || matches!(op, "prelu" | "cdist" | "grid_sample")
}

/// Refuses tensors of dtypes that the operator does not take, and operands whose dtypes differ where they must agree. `tensors`
/// are the operator's, in order, each with its name. In mixed precision, dtypes that a product converts to one count as equal.
///
/// # Errors
///
/// A dtype that the operator does not take: the error names the operator, the tensor, its dtype and those expected.
///
/// ```
/// use isobar_array::kernel::check_dtypes;
/// use tch::{Device, Kind};
///
/// assert!(check_dtypes("mean", [("input", Kind::Half)], Device::Cpu).is_ok());
/// let error = check_dtypes("mean", [("input", Kind::Int64)], Device::Cpu).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "mean: input is of dtype Int64; expected a floating or complex dtype; convert it with to_kind"
/// );
/// ```
pub fn check_dtypes<'a>(
    op: &'static str,
    tensors: impl IntoIterator<Item = (&'a str, Kind)>,
    device: Device,
) -> Result<()> {
    let (first, others) = dtypes(op);
    if (first, others) == (Dtypes::Any, Others::Free) {
        return Ok(());
    }
    let mut tensors = tensors.into_iter();
    let Some((first_name, first_kind)) = tensors.next() else { return Ok(()) };
    let refuse = |name: &str, kind: Kind, expected: &str| {
        let found = format!("{name} is of dtype {kind:?}; expected {expected}");
        Err(argument(op, format!("{found}; convert it with to_kind")))
    };
    if !first.has(first_kind) {
        return refuse(first_name, first_kind, first.expected());
    }
    let lowered = |kind: Kind| if is_lowered(op) { lowered_kind(kind, device) } else { kind };
    let alike = |kind: Kind| lowered(kind) == lowered(first_kind);
    for ((name, kind), index) in tensors.zip(1..) {
        let like_first = match others {
            Others::Free => continue,
            Others::Second(set) | Others::SecondThenAlike(set) if index == 1 => match set.has(kind) {
                true => continue,
                false => return refuse(name, kind, set.expected()),
            },
            Others::NotBothBool if first_kind == Kind::Bool && kind == Kind::Bool => {
                return refuse(name, kind, Dtypes::NotBool.expected());
            }
            Others::Second(_) | Others::NotBothBool => continue,
            Others::NextTwoAlike if index > 2 => continue,
            Others::Alike | Others::SecondThenAlike(_) | Others::NextTwoAlike => alike(kind),
            Others::Parameters => {
                let half = matches!(first_kind, Kind::Half | Kind::BFloat16);
                alike(kind) || (half && kind == Kind::Float)
            }
        };
        if !like_first {
            return refuse(name, kind, &format!("{first_kind:?}, as {first_name} is"));
        }
    }
    Ok(())
}

/// Refuses a number that the dtype does not hold, such as an infinity as an integer.
///
/// # Errors
///
/// The number is outside of the dtype's range.
///
/// ```
/// use isobar_array::kernel::check_number;
/// use tch::Kind;
///
/// assert!(check_number("pad", f64::INFINITY, Kind::Half).is_ok());
/// assert!(check_number("pad", f64::INFINITY, Kind::Int64).is_err());
/// ```
pub fn check_number(op: &'static str, value: f64, kind: Kind) -> Result<()> {
    let Some((low, high)) = range(kind) else { return Ok(()) };
    if (low..=high).contains(&value) || (is_floating(kind) && !value.is_finite()) {
        return Ok(());
    }
    Err(argument(
        op,
        format!("the value {value} is outside the range of {kind:?}; expected {low:e} to {high:e}"),
    ))
}

/// Returns the least value of a dtype, which no maximum is below: −∞ of floating ones.
pub fn least(kind: Kind) -> f64 {
    match range(kind) {
        Some((low, _)) if !is_floating(kind) => low,
        _ => f64::NEG_INFINITY,
    }
}

/// The least and the greatest finite value of a dtype; `None` of those that convert any number.
fn range(kind: Kind) -> Option<(f64, f64)> {
    let integers = |bits: i32| (-2.0_f64.powi(bits - 1), 2.0_f64.powi(bits - 1) - 1.0);
    Some(match kind {
        Kind::Uint8 => (0.0, 255.0),
        Kind::Int8 => integers(8),
        Kind::Int16 => integers(16),
        Kind::Int => integers(32),
        Kind::Int64 => integers(64),
        Kind::Half => (-65504.0, 65504.0),
        Kind::BFloat16 => (-3.389_531_389_251_535_5e38, 3.389_531_389_251_535_5e38),
        Kind::Float => (f64::from(f32::MIN), f64::from(f32::MAX)),
        _ => return None,
    })
}

pub(crate) fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double)
}

fn is_complex(kind: Kind) -> bool {
    matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble)
}
