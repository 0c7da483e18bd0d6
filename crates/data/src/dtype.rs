//! Dtypes of raw little- or big-endian numbers, for formats that this crate reads itself.

/// Numbers that were read, in the smaller of two types that holds them exactly.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Values of float32 and float16, and integers of at most 16 bits.
    F32(Vec<f32>),
    /// Values of other dtypes.
    F64(Vec<f64>),
}

impl Values {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
        }
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Converts the numbers to double precision.
    pub fn into_f64(self) -> Vec<f64> {
        match self {
            Self::F32(values) => values.into_iter().map(f64::from).collect(),
            Self::F64(values) => values,
        }
    }
}

/// A real dtype, and the order of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dtype {
    pub(crate) kind: NumberKind,
    pub(crate) big_endian: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberKind {
    Bool,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    Bf16,
    F32,
    F64,
}

impl NumberKind {
    /// Bytes of a number.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Bits of an integer with a sign, up to 32.
    pub(crate) fn signed_bits(self) -> Option<u32> {
        matches!(self, Self::I8 | Self::I16 | Self::I32).then(|| 8 * self.size() as u32)
    }

    /// Rounds a number to this floating dtype; returns it unchanged for other dtypes.
    pub(crate) fn rounded(self, number: f64) -> f64 {
        match self {
            Self::F32 => f64::from(number as f32),
            Self::F16 => half::f16::from_f64(number).to_f64(),
            Self::Bf16 => half::bf16::from_f64(number).to_f64(),
            _ => number,
        }
    }

    /// Returns NetCDF's default fill value, that of unwritten values; bytes have none.
    pub(crate) fn netcdf_fill(self) -> Option<f64> {
        Some(match self {
            Self::I16 => -32767.0,
            Self::I32 => -2_147_483_647.0,
            Self::U16 => 65535.0,
            Self::U32 => 4_294_967_295.0,
            Self::F32 | Self::F64 => 9.969_209_968_386_869e36,
            _ => return None,
        })
    }
}

impl Dtype {
    /// Decodes numbers; an incomplete last one is ignored.
    pub(crate) fn decode(self, bytes: &[u8]) -> Values {
        let single = |number: fn([u8; 2]) -> f32| Values::F32(self.each(bytes, number));
        match self.kind {
            NumberKind::Bool => {
                Values::F32(bytes.iter().map(|&byte| f32::from(u8::from(byte != 0))).collect())
            }
            NumberKind::U8 => Values::F32(bytes.iter().map(|&byte| f32::from(byte)).collect()),
            NumberKind::I8 => Values::F32(bytes.iter().map(|&byte| f32::from(byte as i8)).collect()),
            NumberKind::I16 => single(|bytes| f32::from(i16::from_le_bytes(bytes))),
            NumberKind::U16 => single(|bytes| f32::from(u16::from_le_bytes(bytes))),
            NumberKind::F16 => single(|bytes| half::f16::from_le_bytes(bytes).to_f32()),
            NumberKind::Bf16 => single(|bytes| half::bf16::from_le_bytes(bytes).to_f32()),
            NumberKind::F32 => Values::F32(self.each(bytes, f32::from_le_bytes)),
            NumberKind::I32 => Values::F64(self.each(bytes, |bytes| f64::from(i32::from_le_bytes(bytes)))),
            NumberKind::U32 => Values::F64(self.each(bytes, |bytes| f64::from(u32::from_le_bytes(bytes)))),
            NumberKind::I64 => Values::F64(self.each(bytes, |bytes| i64::from_le_bytes(bytes) as f64)),
            NumberKind::U64 => Values::F64(self.each(bytes, |bytes| u64::from_le_bytes(bytes) as f64)),
            NumberKind::F64 => Values::F64(self.each(bytes, f64::from_le_bytes)),
        }
    }

    fn each<const N: usize, T>(self, bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
        let one = |bytes: &[u8; N]| {
            let mut bytes = *bytes;
            if self.big_endian {
                bytes.reverse();
            }
            number(bytes)
        };
        bytes.as_chunks::<N>().0.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_either_byte_order_and_each_width() {
        let of = |kind, big_endian, bytes: &[u8]| Dtype { kind, big_endian }.decode(bytes);
        assert_eq!(of(NumberKind::F32, false, &1.5_f32.to_le_bytes()), Values::F32(vec![1.5]));
        assert_eq!(of(NumberKind::F32, true, &1.5_f32.to_be_bytes()), Values::F32(vec![1.5]));
        assert_eq!(of(NumberKind::I16, true, &(-2_i16).to_be_bytes()), Values::F32(vec![-2.0]));
        assert_eq!(of(NumberKind::I64, false, &(-7_i64).to_le_bytes()), Values::F64(vec![-7.0]));
        assert_eq!(of(NumberKind::Bool, false, &[0, 1, 2]), Values::F32(vec![0.0, 1.0, 1.0]));
        assert_eq!(of(NumberKind::I8, false, &[0xff]), Values::F32(vec![-1.0]));
        assert_eq!(of(NumberKind::Bf16, false, &[0x80, 0x3f]), Values::F32(vec![1.0]));
    }
}
