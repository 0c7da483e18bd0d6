//! Matrices of the discrete Fourier transform, for transforms that are short enough to be products with them.

use std::f64::consts::TAU;
use std::ops::Range;

use isobar_torch::memory::from_vec;
use tch::{Kind, Tensor};

use super::named;
use crate::error::Result;

/// The matrix `[2 K, n]` from `n` real numbers to their modes `columns`, ranges one after another: K real parts, then K
/// imaginary parts.
pub(super) fn real_forward(n: i64, columns: &[Range<i64>], scale: f64, kind: Kind) -> Result<Tensor> {
    let (wave, count) = (Wave::new(n, scale), count(columns));
    let mut values = Vec::with_capacity(2 * count as usize * n as usize);
    for mode in indices(columns) {
        values.extend((0..n).map(|x| wave.cos(mode, x)));
    }
    for mode in indices(columns) {
        values.extend((0..n).map(|x| -wave.sin(mode, x)));
    }
    matrix(values, [2 * count, n], kind)
}

/// The matrix `[n, 2 K]` back from the modes `columns` of a half spectrum, the others being zero, to `n` real numbers.
/// Modes that have a mirror image count twice; of the others the imaginary part does not matter.
pub(super) fn real_inverse(n: i64, columns: &[Range<i64>], scale: f64, kind: Kind) -> Result<Tensor> {
    let (wave, count) = (Wave::new(n, scale), count(columns));
    let twice = |mode: i64| if mode == 0 || 2 * mode == n { 1.0 } else { 2.0 };
    let mirrored = |mode: i64| if mode == 0 || 2 * mode == n { 0.0 } else { 2.0 };
    let mut values = Vec::with_capacity(2 * count as usize * n as usize);
    for x in 0..n {
        values.extend(indices(columns).map(|mode| twice(mode) * wave.cos(mode, x)));
        values.extend(indices(columns).map(|mode| -mirrored(mode) * wave.sin(mode, x)));
    }
    matrix(values, [n, 2 * count], kind)
}

/// The matrix `[2 R, 2 n]` from `n` complex numbers, real and imaginary part side by side, to their modes `rows`: R real
/// parts, then R imaginary parts. Its transpose is the inverse transform, up to the scale.
pub(super) fn complex_forward(n: i64, rows: &[Range<i64>], scale: f64, kind: Kind) -> Result<Tensor> {
    let (wave, count) = (Wave::new(n, scale), count(rows));
    let mut values = Vec::with_capacity(4 * count as usize * n as usize);
    // (cos − i sin)(re + i im) has the real part cos·re + sin·im and the imaginary part −sin·re + cos·im.
    for mode in indices(rows) {
        values.extend((0..n).flat_map(|x| [wave.cos(mode, x), wave.sin(mode, x)]));
    }
    for mode in indices(rows) {
        values.extend((0..n).flat_map(|x| [-wave.sin(mode, x), wave.cos(mode, x)]));
    }
    matrix(values, [2 * count, 2 * n], kind)
}

/// Returns the number of modes in consecutive ranges.
pub(super) fn count(ranges: &[Range<i64>]) -> i64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// The modes of ranges one after another.
pub(super) fn indices(ranges: &[Range<i64>]) -> impl Iterator<Item = i64> {
    ranges.iter().cloned().flatten()
}

/// Scaled cosines and sines of all multiples of 2π / n.
struct Wave {
    n: i64,
    cos: Vec<f64>,
    sin: Vec<f64>,
}

impl Wave {
    fn new(n: i64, scale: f64) -> Self {
        let angles = || (0..n).map(|index| TAU * index as f64 / n as f64);
        Self {
            n,
            cos: angles().map(|a| scale * a.cos()).collect(),
            sin: angles().map(|a| scale * a.sin()).collect(),
        }
    }

    fn cos(&self, mode: i64, x: i64) -> f64 {
        self.cos[(mode * x % self.n) as usize]
    }

    fn sin(&self, mode: i64, x: i64) -> f64 {
        self.sin[(mode * x % self.n) as usize]
    }
}

fn matrix(values: Vec<f64>, shape: [i64; 2], kind: Kind) -> Result<Tensor> {
    let double = from_vec(values, &shape)?;
    named("to_kind", &[&double], double.f_to_kind(kind))
}
