//! The header of a `.npy` file.

use std::io::Read;
use std::path::Path;

use crate::dtype::{Dtype, NumberKind};
use crate::{Error, Result};

pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// Bytes of the longest header that is read; numpy's own limit is 10,000.
const LONGEST: usize = 1 << 16;

/// Most axes of an array, numpy's own limit.
const MOST_AXES: usize = 64;

#[derive(Debug, PartialEq)]
pub(super) struct Header {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) fortran: bool,
}

impl Header {
    /// Reads the header of an array, and returns it with its length in bytes.
    pub(super) fn read(reader: &mut impl Read, path: &Path, name: &str) -> Result<(Self, u64)> {
        let misfit = |found: String, expected: &str| Error::Layout {
            path: path.to_owned(),
            name: name.to_owned(),
            found,
            expected: expected.to_owned(),
        };
        let mut fill = |bytes: &mut [u8]| {
            reader
                .read_exact(bytes)
                .map_err(|_| misfit("cut off in its header".to_owned(), "a complete .npy array"))
        };
        let mut start = [0; 8];
        fill(&mut start)?;
        if &start[..6] != MAGIC {
            return Err(misfit("without the magic bytes of NumPy".to_owned(), "a .npy array"));
        }
        let (length, before) = if start[6] == 1 {
            let mut length = [0; 2];
            fill(&mut length)?;
            (usize::from(u16::from_le_bytes(length)), 10)
        } else {
            let mut length = [0; 4];
            fill(&mut length)?;
            (u32::from_le_bytes(length) as usize, 12)
        };
        if !(1..=3).contains(&start[6]) || length > LONGEST {
            let found = format!("of version {} with a header of {length} bytes", start[6]);
            return Err(misfit(found, "version 1 to 3 with a header of at most 65536 bytes"));
        }
        let mut text = vec![0; length];
        fill(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        let header = parse(&text).ok_or_else(|| {
            let shown: String = text.trim().chars().take(120).filter(|letter| !letter.is_control()).collect();
            misfit(
                format!("of the header {shown:?}"),
                "real numbers or booleans (no objects, strings, complex numbers or records)",
            )
        })?;
        Ok((header, (before + length) as u64))
    }

    /// Rejects an array with more numbers than the bytes that are there, before memory is taken for them.
    pub(super) fn check_length(&self, path: &Path, name: &str, there: u64) -> Result<()> {
        let size = self.dtype.kind.size() as u64;
        let needed = self.shape.iter().try_fold(size, |bytes, &extent| bytes.checked_mul(extent as u64));
        if needed.is_some_and(|needed| needed <= there) {
            return Ok(());
        }
        Err(Error::Layout {
            path: path.to_owned(),
            name: name.to_owned(),
            found: format!("of shape {:?} in {there} bytes", self.shape),
            expected: "no more values than there are bytes; copy or download the file again".to_owned(),
        })
    }
}

/// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`, of keys in any order.
fn parse(text: &str) -> Option<Header> {
    let body = text.trim().strip_prefix('{')?.strip_suffix('}')?;
    let (mut dtype, mut shape, mut fortran) = (None, None, None);
    let mut rest = body.trim_start();
    while !rest.is_empty() {
        let (key, after) = quoted(rest)?;
        let value = after.trim_start().strip_prefix(':')?.trim_start();
        rest = match key {
            "descr" => {
                let (text, after) = quoted(value)?;
                dtype = Some(descr(text)?);
                after
            }
            "fortran_order" => {
                let flag = value.starts_with("True");
                fortran = Some(flag);
                value.strip_prefix(if flag { "True" } else { "False" })?
            }
            "shape" => {
                let (inside, after) = value.strip_prefix('(')?.split_once(')')?;
                let extents = inside.split(',').map(str::trim).filter(|extent| !extent.is_empty());
                shape = Some(extents.map(|extent| extent.parse().ok()).collect::<Option<Vec<usize>>>()?);
                after
            }
            _ => return None,
        };
        rest = rest.trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
    let shape = shape.filter(|shape| shape.len() <= MOST_AXES)?;
    Some(Header { dtype: dtype?, shape, fortran: fortran? })
}

fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|letter| matches!(letter, '\'' | '"'))?;
    text[1..].split_once(quote)
}

fn descr(text: &str) -> Option<Dtype> {
    let (order, kind) = text.split_at_checked(1)?;
    let kind = match kind {
        "b1" => NumberKind::Bool,
        "i1" => NumberKind::I8,
        "u1" => NumberKind::U8,
        "i2" => NumberKind::I16,
        "u2" => NumberKind::U16,
        "i4" => NumberKind::I32,
        "u4" => NumberKind::U32,
        "i8" => NumberKind::I64,
        "u8" => NumberKind::U64,
        "f2" => NumberKind::F16,
        "f4" => NumberKind::F32,
        "f8" => NumberKind::F64,
        _ => return None,
    };
    let big_endian = match order {
        "<" => false,
        ">" => true,
        "|" if kind.size() == 1 => false,
        _ => return None,
    };
    Some(Dtype { kind, big_endian })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_in_any_order_of_keys() {
        let big = parse("{'shape': (3,), 'descr': '>f8', 'fortran_order': True}").unwrap();
        let dtype = Dtype { kind: NumberKind::F64, big_endian: true };
        assert_eq!(big, Header { dtype, shape: vec![3], fortran: true });
        let scalar = parse("{'descr': '|b1', 'fortran_order': False, 'shape': (), }   \n").unwrap();
        assert!(scalar.shape.is_empty() && !scalar.fortran);
    }

    #[rstest::rstest]
    #[case("")]
    #[case("{")]
    #[case("{}")]
    #[case("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}")]
    #[case("{'descr': '<c8', 'fortran_order': False, 'shape': (2,)}")]
    #[case("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}")]
    #[case("{'descr': '|f4', 'fortran_order': False, 'shape': (2,)}")]
    #[case("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}")]
    #[case("{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}")]
    #[case("{'descr': '<f4', 'fortran_order': False}")]
    #[case("{'descr': 'é")]
    fn what_is_no_array_of_numbers_is_refused(#[case] text: &str) {
        assert_eq!(parse(text), None);
    }
}
