//! Dtypes that operators take. Dense and sharded operators reject other dtypes before they call libtorch, whose kernels accept
//! any dtype on an empty shard.

use tch::{Device, Kind};

use crate::error::{Result, argument};
use crate::precision::{full_kind, lowered_kind};

/// Dtypes that an operator takes as one of its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// Any.
    Any,
    /// `Bool`.
    Bool,
    /// `Bool` or `Uint8`: conditions.
    Condition,
    /// `Int64` or `Int`: indices.
    Index,
    /// A floating dtype.
    Floating,
    /// A floating or complex dtype.
    FloatingOrComplex,
    /// A floating dtype or `Uint8`, the dtype of images.
    FloatingOrUint8,
    /// A floating dtype or `Int64`.
    FloatingOrInt64,
    /// An integer or floating dtype.
    Real,
    /// Any but complex dtypes.
    NotComplex,
    /// Any but `Bool`.
    NotBool,
    /// Any; but not `Bool` if the first tensor is of `Bool`.
    NotBothBool,
    /// The dtype of the first tensor.
    Same,
    /// The dtype of the first tensor; in mixed precision, any dtype that is cast to the same one.
    Operand,
    /// The dtype of the first tensor, or `Float` beside 16 bits: parameters of norms.
    Parameter,
}

impl Dtype {
    /// Returns whether an operator takes `kind`, where the first of its tensors is of `first`.
    fn has(self, kind: Kind, first: Kind, device: Device) -> bool {
        let (floating, complex) = (is_floating(kind), is_complex(kind));
        match self {
            Self::Any => true,
            Self::Bool => kind == Kind::Bool,
            Self::Condition => matches!(kind, Kind::Bool | Kind::Uint8),
            Self::Index => matches!(kind, Kind::Int | Kind::Int64),
            Self::Floating => floating,
            Self::FloatingOrComplex => floating || complex,
            Self::FloatingOrUint8 => floating || kind == Kind::Uint8,
            Self::FloatingOrInt64 => floating || kind == Kind::Int64,
            Self::Real => !complex && kind != Kind::Bool,
            Self::NotComplex => !complex,
            Self::NotBool => kind != Kind::Bool,
            Self::NotBothBool => kind != Kind::Bool || first != Kind::Bool,
            Self::Same => kind == first,
            Self::Operand => lowered_kind(kind, device) == lowered_kind(first, device),
            Self::Parameter => {
                let is_wider = kind == Kind::Float && matches!(first, Kind::Half | Kind::BFloat16);
                is_wider || full_kind(kind, device) == full_kind(first, device)
            }
        }
    }

    /// Returns the dtypes in words; `None` if they depend on the first tensor.
    fn expected(self) -> Option<&'static str> {
        Some(match self {
            Self::Any => "any dtype",
            Self::Bool => "Bool",
            Self::Condition => "Bool or Uint8",
            Self::Index => "Int64 or Int",
            Self::Floating => "a floating dtype",
            Self::FloatingOrComplex => "a floating or complex dtype",
            Self::FloatingOrUint8 => "a floating dtype or Uint8",
            Self::FloatingOrInt64 => "a floating dtype or Int64",
            Self::Real => "an integer or floating dtype",
            Self::NotComplex => "a dtype that is not complex",
            Self::NotBool | Self::NotBothBool => "an integer, floating or complex dtype",
            Self::Same | Self::Operand | Self::Parameter => return None,
        })
    }
}

/// Refuses tensors of dtypes that an operator does not take. `tensors` are the operator's, in order, each with its name, its dtype
/// and the accepted dtypes.
///
/// # Errors
///
/// A dtype that the operator does not take: the error names the operator, the tensor, its dtype and those expected.
///
/// ```
/// use isobar_array::kernel::{Dtype, check_dtypes};
/// use tch::{Device, Kind};
///
/// let check = |kind| check_dtypes("mean", [("input", kind, Dtype::FloatingOrComplex)], Device::Cpu);
/// assert!(check(Kind::Half).is_ok());
/// assert_eq!(
///     check(Kind::Int64).unwrap_err().to_string(),
///     "mean: input is of dtype Int64; expected a floating or complex dtype; convert it with to_kind"
/// );
/// ```
pub fn check_dtypes<'a>(
    op: &'static str,
    tensors: impl IntoIterator<Item = (&'a str, Kind, Dtype)>,
    device: Device,
) -> Result<()> {
    let mut tensors = tensors.into_iter().peekable();
    let Some(&(first_name, first, _)) = tensors.peek() else { return Ok(()) };
    for (name, kind, dtype) in tensors {
        if dtype.has(kind, first, device) {
            continue;
        }
        let expected = match dtype.expected() {
            Some(expected) => expected.to_owned(),
            None => format!("{first:?}, as {first_name} is"),
        };
        let found = format!("{name} is of dtype {kind:?}; expected {expected}");
        return Err(argument(op, format!("{found}; convert it with to_kind")));
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
