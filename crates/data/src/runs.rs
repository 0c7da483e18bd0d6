//! Bytes of a window of a C-ordered array.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The contiguous runs of a window, as offsets in numbers, ascending: each covers `length` numbers.
pub(crate) struct Runs {
    pub(crate) length: usize,
    pub(crate) starts: Vec<u64>,
}

/// Finds the runs of a window with no empty range.
pub(crate) fn runs(shape: &[usize], window: &[Range<usize>]) -> Runs {
    let mut strides = vec![1_u64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis] as u64;
    }
    // Axes from here on are one run: all behind the first of them are complete.
    let mut split = shape.len();
    let mut length = 1;
    while split > 0 {
        split -= 1;
        length *= window[split].len();
        if window[split].len() != shape[split] {
            break;
        }
    }
    let base: u64 =
        window.iter().zip(&strides).skip(split).map(|(range, stride)| range.start as u64 * stride).sum();
    let mut starts = vec![base];
    for axis in (0..split).rev() {
        let stride = strides[axis];
        let shifted = |at: usize| starts.iter().map(move |start| start + at as u64 * stride);
        starts = window[axis].clone().flat_map(shifted).collect();
    }
    Runs { length, starts }
}

/// Reads a window of an array of numbers of `size` bytes, which begins at a byte of a file.
pub(crate) fn read_runs(
    file: &File,
    start: u64,
    size: usize,
    shape: &[usize],
    window: &[Range<usize>],
) -> std::io::Result<Vec<u8>> {
    let runs = runs(shape, window);
    let length = runs.length * size;
    let mut bytes = vec![0; runs.starts.len() * length];
    for (piece, first) in bytes.chunks_exact_mut(length).zip(&runs.starts) {
        file.read_exact_at(piece, start + first * size as u64)?;
    }
    Ok(bytes)
}

/// A C-ordered array of little-endian float32 in a file that is being written.
#[derive(Debug)]
pub(crate) struct RawArray {
    pub(crate) file: Arc<File>,
    /// Offset of the first number, in bytes.
    pub(crate) start: u64,
    pub(crate) shape: Vec<usize>,
}

impl RawArray {
    /// Writes a window with no empty range.
    pub(crate) fn write(&self, window: &[Range<usize>], values: &[f32]) -> std::io::Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let runs = runs(&self.shape, window);
        for (piece, first) in bytes.chunks_exact(runs.length * size_of::<f32>()).zip(&runs.starts) {
            self.file.write_all_at(piece, self.start + first * size_of::<f32>() as u64)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "the window of a single axis")]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(&[], &[], 1, &[0])]
    #[case(&[5], &[1..4], 3, &[1])]
    #[case(&[2, 3, 4], &[0..2, 0..3, 0..4], 24, &[0])]
    #[case(&[2, 3, 4], &[1..2, 1..3, 0..4], 8, &[16])]
    #[case(&[2, 3, 4], &[0..2, 1..3, 0..4], 8, &[4, 16])]
    #[case(&[2, 3, 4], &[0..2, 1..3, 1..3], 2, &[5, 9, 17, 21])]
    fn windows_are_few_runs(
        #[case] shape: &[usize],
        #[case] window: &[Range<usize>],
        #[case] length: usize,
        #[case] starts: &[u64],
    ) {
        let found = runs(shape, window);
        assert_eq!((found.length, &found.starts[..]), (length, starts));
    }
}
