//! Rust's element types as torch dtypes, complex and bfloat16 included.
//!
//! tch has no complex elements, and takes [`half::bf16`] for [`Kind::Half`]; here each type has the kind of its own
//! bits. Complex numbers are those of `num-complex`: torch's layout (`repr(C)`, real part first) with arithmetic,
//! and the type that other numeric crates use.
//!
//! ```
//! use isobar_torch::{Complex32, Element};
//! use tch::Kind;
//!
//! assert_eq!(Complex32::KIND, Kind::ComplexFloat);
//! assert_eq!(half::bf16::KIND, Kind::BFloat16);
//! ```

use std::ffi::c_int;

use tch::Kind;

/// A complex number of two `f32`, [`Kind::ComplexFloat`].
pub type Complex32 = num_complex::Complex32;
/// A complex number of two `f64`, [`Kind::ComplexDouble`].
pub type Complex64 = num_complex::Complex64;

/// A type that tensors of [`Self::KIND`] are made of.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The dtype whose elements have this type's bits.
    const KIND: Kind;
}

mod sealed {
    /// Promises that the type has the size and bits of its dtype, and that any bits are a value, `bool` excepted.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $kind:ident),* $(,)?) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {
            const KIND: Kind = Kind::$kind;
        }
    )*};
}

elements! {
    u8 => Uint8, i8 => Int8, i16 => Int16, i32 => Int, i64 => Int64, bool => Bool,
    half::f16 => Half, half::bf16 => BFloat16, f32 => Float, f64 => Double,
    Complex32 => ComplexFloat, Complex64 => ComplexDouble,
}

/// libtorch's number of a dtype, c10::ScalarType.
pub(crate) fn scalar_type(kind: Kind) -> c_int {
    match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::ComplexHalf => 8,
        Kind::ComplexFloat => 9,
        Kind::ComplexDouble => 10,
        Kind::Bool => 11,
        Kind::QInt8 => 12,
        Kind::QUInt8 => 13,
        Kind::QInt32 => 14,
        Kind::BFloat16 => 15,
        Kind::Float8e5m2 => 23,
        Kind::Float8e4m3fn => 24,
        Kind::Float8e5m2fnuz => 25,
        Kind::Float8e4m3fnuz => 26,
    }
}
