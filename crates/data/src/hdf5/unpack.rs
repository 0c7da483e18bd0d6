//! Decoding of HDF5's chunk filters: shuffle, deflate and Fletcher32, in memory of a size that is known in advance.

use std::cell::RefCell;

use libdeflater::{DecompressionError, Decompressor};

use crate::spare::{buffer, keep};

/// Filter of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Groups the bytes of all values by their place in the value.
    Shuffle,
    /// Compresses, in zlib's format.
    Deflate,
    /// Appends a checksum of 4 bytes.
    Fletcher32,
}

/// Bytes of a checksum.
const CHECKSUM: usize = 4;

/// Unpacks a chunk of `bytes` bytes of values of `width` bytes each. `steps` are the filters in the order in which writers apply
/// them, with at most one [`Step::Deflate`]; bit `i` of `skipped` is set if the writer left out step `i`.
///
/// # Errors
///
/// A chunk that cannot be inflated, has a wrong checksum, or unpacks to another size.
pub(super) fn unpack(
    steps: &[Step],
    skipped: u32,
    packed: Vec<u8>,
    width: usize,
    bytes: usize,
) -> Result<Vec<u8>, String> {
    let applied = |at: usize| skipped.checked_shr(at as u32).unwrap_or(0) & 1 == 0;
    // Checksums of packed bytes are removed before the chunk is inflated; others are packed with the values.
    let most = bytes + CHECKSUM * steps.len();
    let mut chunk = packed;
    for (_, step) in steps.iter().enumerate().rev().filter(|(at, _)| applied(*at)) {
        chunk = match step {
            Step::Shuffle => replaced(chunk, |chunk| unshuffle(chunk, width))?,
            Step::Deflate => replaced(chunk, |chunk| inflate(chunk, most))?,
            Step::Fletcher32 => verified(chunk)?,
        };
        if chunk.len() > most {
            break;
        }
    }
    match chunk.len() {
        length if length > bytes => Err(format!("unpacks to more than its {bytes} bytes")),
        length if length < bytes => Err(format!("unpacks to {length} bytes, fewer than its {bytes}")),
        _ => Ok(chunk),
    }
}

/// Makes a chunk of another, whose memory is kept for the next.
fn replaced(chunk: Vec<u8>, make: impl FnOnce(&[u8]) -> Result<Vec<u8>, String>) -> Result<Vec<u8>, String> {
    let made = make(&chunk);
    keep(chunk);
    made
}

/// Inflates a stream to at most `most + 1` bytes.
fn inflate(packed: &[u8], most: usize) -> Result<Vec<u8>, String> {
    thread_local! {
        /// One for all chunks of a thread: to make one takes time.
        static INFLATE: RefCell<Decompressor> = RefCell::new(Decompressor::new());
    }
    let mut out = buffer(most + 1).map_err(|error| error.to_string())?;
    match INFLATE.with_borrow_mut(|inflate| inflate.zlib_decompress(packed, &mut out)) {
        Ok(length) => out.truncate(length),
        // The caller rejects it for its length.
        Err(DecompressionError::InsufficientSpace) => {}
        Err(DecompressionError::BadData) => {
            return Err("cannot be inflated; it is damaged or cut off".to_owned());
        }
    }
    Ok(out)
}

/// Puts the bytes of each value of `width` bytes side by side. Bytes after the last value stay at the end.
fn unshuffle(shuffled: &[u8], width: usize) -> Result<Vec<u8>, String> {
    let count = shuffled.len() / width.max(1);
    if width <= 1 || count <= 1 {
        return Ok(shuffled.to_vec());
    }
    let mut out = buffer(shuffled.len()).map_err(|error| error.to_string())?;
    match width {
        2 => interleave::<2>(shuffled, count, &mut out),
        4 => interleave::<4>(shuffled, count, &mut out),
        8 => interleave::<8>(shuffled, count, &mut out),
        _ => {
            for (at, value) in out.chunks_exact_mut(width).enumerate() {
                value.iter_mut().enumerate().for_each(|(byte, to)| *to = shuffled[byte * count + at]);
            }
        }
    }
    let whole = count * width;
    out[whole..].copy_from_slice(&shuffled[whole..]);
    Ok(out)
}

/// Does the work of [`unshuffle`] for a width that the compiler knows.
fn interleave<const N: usize>(shuffled: &[u8], count: usize, out: &mut [u8]) {
    let planes: [&[u8]; N] = std::array::from_fn(|byte| &shuffled[byte * count..][..count]);
    let out = &mut out.as_chunks_mut::<N>().0[..count];
    // By index: all slices have this length, so that no index needs a check.
    for at in 0..count {
        out[at] = std::array::from_fn(|byte| planes[byte][at]);
    }
}

/// Verifies the checksum and removes it.
fn verified(mut chunk: Vec<u8>) -> Result<Vec<u8>, String> {
    let length = chunk.len().checked_sub(CHECKSUM).ok_or("has no checksum")?;
    let stored = chunk.split_off(length);
    let sum = fletcher32(&chunk);
    // Some old writers swapped the bytes of each half.
    let swapped = (sum & 0x00ff_00ff) << 8 | (sum >> 8) & 0x00ff_00ff;
    match [sum, swapped].iter().any(|sum| sum.to_le_bytes() == stored[..]) {
        true => Ok(chunk),
        false => Err("has another Fletcher32 checksum".to_owned()),
    }
}

/// HDF5's Fletcher32: sums of big-endian words of 16 bits, the last one filled with a zero.
fn fletcher32(bytes: &[u8]) -> u32 {
    let fold = |sum: u32| (sum & 0xffff) + (sum >> 16);
    let (mut first, mut second) = (0_u32, 0_u32);
    // As many words as cannot overflow the sums.
    for block in bytes.chunks(720) {
        for word in block.chunks(2) {
            first += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
            second += first;
        }
        (first, second) = (fold(first), fold(second));
    }
    fold(second) << 16 | fold(first)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::ZlibEncoder;

    use super::*;

    fn deflate(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[rstest::rstest]
    #[case(1, b"abcdef", b"abcdef")]
    #[case(2, b"acebdf", b"abcdef")]
    #[case(3, b"adbecfx", b"abcdefx")]
    #[case(4, b"aebfcgdhxyz", b"abcdefghxyz")]
    #[case(8, b"abcdefgh", b"abcdefgh")]
    fn bytes_of_values_come_together(#[case] width: usize, #[case] shuffled: &[u8], #[case] expected: &[u8]) {
        assert_eq!(unshuffle(shuffled, width).unwrap(), expected);
    }

    #[test]
    fn filters_are_undone_from_the_last() {
        let steps = [Step::Shuffle, Step::Deflate];
        let unpacked = |bytes, skipped| unpack(&steps, skipped, bytes, 2, 6);
        assert_eq!(unpacked(deflate(b"acebdf"), 0).unwrap(), b"abcdef");
        assert_eq!(unpacked(b"acebdf".to_vec(), 0b10).unwrap(), b"abcdef");
        assert_eq!(unpacked(deflate(b"abcdef"), 0b01).unwrap(), b"abcdef");
    }

    #[rstest::rstest]
    #[case(deflate(&[0; 5]), "unpacks to 5 bytes, fewer than its 6")]
    #[case(deflate(&[0; 7]), "unpacks to more than its 6 bytes")]
    #[case(deflate(&[0; 70_000]), "unpacks to more than its 6 bytes")]
    #[case(deflate(b"acebdf")[..9].to_vec(), "cannot be inflated")]
    #[case(b"acebdf".to_vec(), "cannot be inflated")]
    #[case(Vec::new(), "cannot be inflated")]
    fn other_sizes_are_errors(#[case] packed: Vec<u8>, #[case] words: &str) {
        let error = unpack(&[Step::Shuffle, Step::Deflate], 0, packed, 2, 6).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}
