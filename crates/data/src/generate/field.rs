//! Gaussian random fields.

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par};
use isobar_array::{Generator, Window};
use tch::{Device, Kind};

use crate::Result;

/// Draws from N(0, (−Δ + 9)⁻²) with zero Neumann boundary on the unit square, without its mean: the field whose sign is
/// the coefficient in the Darcy data of Li et al., "Fourier Neural Operator for Parametric Partial Differential
/// Equations" (ICLR 2021), taken at the n × n cell centres.
///
/// The field is Σ ξ_kl (π²(k² + l²) + 9)⁻¹ c_k(x) c_l(y) over 0 ≤ k, l < n but k = l = 0, with independent standard
/// normal ξ and the cosines c_0 = 1, c_k(x) = √2 cos(πkx) that are orthonormal on the unit interval and on the centres.
pub(crate) struct GaussianField {
    n: usize,
    /// c_k at centre i, in row i and column k.
    cosines: Mat<f64>,
}

/// The paper's τ².
const INVERSE_LENGTH_SQUARED: f64 = 9.0;

impl GaussianField {
    pub(crate) fn new(n: usize) -> Self {
        let cosines = Mat::from_fn(n, n, |i, k| {
            let scale = if k == 0 { 1.0 } else { std::f64::consts::SQRT_2 };
            let x = (i as f64 + 0.5) / n as f64;
            scale * (std::f64::consts::PI * k as f64 * x).cos()
        });
        Self { n, cosines }
    }

    /// The field of sample number `sample` under `seed`, as n² cell values with x as the slower index.
    pub(crate) fn draw(&self, seed: u64, sample: u64) -> Result<Vec<f64>> {
        let n = self.n;
        // Sample number i is draw number i of a generator of its own.
        let generator = Generator::resume(Generator::new(seed).fork("darcy").seed(), sample);
        let all = Window::whole(&[(n * n) as i64]);
        let normals = Vec::<f64>::try_from(generator.normal(&all, 0.0, 1.0, (Kind::Double, Device::Cpu))?)?;
        let mut amplitudes = Mat::zeros(n, n);
        for ((k, l), normal) in outwards(n).zip(normals) {
            let wave = std::f64::consts::PI.powi(2) * (k * k + l * l) as f64;
            amplitudes[(k, l)] = normal / (wave + INVERSE_LENGTH_SQUARED);
        }
        amplitudes[(0, 0)] = 0.0;
        let mut half = Mat::zeros(n, n);
        matmul(&mut half, Accum::Replace, &self.cosines, &amplitudes, 1.0, Par::Seq);
        let mut field = Mat::zeros(n, n);
        matmul(&mut field, Accum::Replace, &half, self.cosines.transpose(), 1.0, Par::Seq);
        Ok((0..n * n).map(|cell| field[(cell / n, cell % n)]).collect())
    }
}

/// Wave numbers from the longest waves on, so that the same seed draws the same large features at every resolution.
fn outwards(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).flat_map(|ring| (0..ring).map(move |k| (k, ring)).chain((0..=ring).map(move |l| (ring, l))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wave_number_occurs_once_and_a_finer_grid_begins_alike() {
        let mut coarse: Vec<_> = outwards(5).collect();
        assert_eq!(coarse, outwards(9).take(25).collect::<Vec<_>>());
        coarse.sort_unstable();
        assert_eq!(coarse, (0..5).flat_map(|k| (0..5).map(move |l| (k, l))).collect::<Vec<_>>());
    }

    #[test]
    fn the_variance_is_the_sum_of_the_eigenvalues() {
        let n = 8;
        let field = GaussianField::new(n);
        let draws = 4000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for sample in 0..draws {
            let values = field.draw(11, sample).unwrap();
            sum += values.iter().sum::<f64>();
            squares += values.iter().map(|value| value * value).sum::<f64>();
        }
        let count = (n * n) as f64 * draws as f64;
        // The cosines are orthonormal on the centres: the mean square over the cells is the sum over the waves.
        let expected: f64 = outwards(n)
            .skip(1)
            .map(|(k, l)| (std::f64::consts::PI.powi(2) * (k * k + l * l) as f64 + 9.0).powi(-2))
            .sum();
        assert!(sum.abs() / count < 1e-12, "each field has zero mean, {}", sum / count);
        assert!((squares / count / expected - 1.0).abs() < 0.05, "{} {expected}", squares / count);
    }

    #[test]
    fn a_finer_grid_shows_the_same_field() {
        let (coarse, fine) =
            (GaussianField::new(16).draw(3, 1).unwrap(), GaussianField::new(32).draw(3, 1).unwrap());
        // Means of 2 x 2 fine cells against coarse cells: what differs are short waves only.
        let (mut difference, mut size) = (0.0, 0.0);
        for (cell, value) in coarse.iter().enumerate() {
            let (i, j) = (cell / 16 * 2, cell % 16 * 2);
            let mean =
                [(0, 0), (0, 1), (1, 0), (1, 1)].iter().map(|(a, b)| fine[(i + a) * 32 + j + b]).sum::<f64>()
                    / 4.0;
            difference += (mean - value).powi(2);
            size += value.powi(2);
        }
        assert!((difference / size).sqrt() < 0.1, "{}", (difference / size).sqrt());
    }
}
