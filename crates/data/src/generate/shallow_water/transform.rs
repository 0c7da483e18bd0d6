//! Spherical-harmonic transforms.

use tch::Tensor;

use super::legendre::{Functions, gauss_legendre};
use crate::Result;

/// Latitudes and longitudes at which fields on the unit sphere are evaluated from their spherical harmonics, with triangular truncation.
///
/// A field is Σ c(m, l) P(l, m)(sin φ) e^(imλ) over |m| ≤ l ≤ truncation, with Legendre functions of unit norm on `[-1, 1]`. Coefficients
/// are complex float64, `[…, m, l]`, for m ≥ 0; those with l < m are zero. Fields are float64, `[…, latitude, longitude]`, with equally
/// spaced longitudes from 0 on. Components of vectors are multiplied by cos φ, which makes them smooth at the poles.
#[derive(Debug)]
pub(super) struct Grid {
    longitudes: usize,
    /// Legendre functions, `[m, latitude, l]`.
    values: Tensor,
    /// Legendre functions and (1 − μ²) dP/dμ, `[m, latitude, 2 l]`.
    values_and_slopes: Tensor,
    /// i m, `[m, 1]`: the derivative along longitudes.
    eastward: Tensor,
}

impl Grid {
    /// Makes the tables for latitudes that are given by their sines.
    pub(super) fn new(truncation: usize, sines: &[f64], longitudes: usize) -> Result<Self> {
        let Functions { values, slopes } = Functions::new(truncation, sines)?;
        let values_and_slopes = Tensor::f_cat(&[&values, &slopes], 2)?;
        let waves: Vec<f64> = (0..=truncation).map(|m| m as f64).collect();
        let waves = Tensor::f_from_slice(&waves)?.f_unsqueeze(1)?;
        let eastward = Tensor::f_complex(&waves.f_zeros_like()?, &waves)?;
        Ok(Self { longitudes, values, values_and_slopes, eastward })
    }

    /// Evaluates fields, `[field, m, l]`.
    pub(super) fn fields(&self, coefficients: &Tensor) -> Result<Tensor> {
        self.sum(&self.values, coefficients)
    }

    /// Evaluates the vector k × ∇ψ + ∇χ: its eastward and northward components times cos φ, `[2, latitude, longitude]`.
    pub(super) fn vector(&self, psi: &Tensor, chi: &Tensor) -> Result<Tensor> {
        let east = Tensor::f_cat(&[&self.eastward.f_mul(chi)?, &psi.f_neg()?], 1)?;
        let north = Tensor::f_cat(&[&self.eastward.f_mul(psi)?, chi], 1)?;
        self.sum(&self.values_and_slopes, &Tensor::f_stack(&[east, north], 0)?)
    }

    /// Sums functions `[m, latitude, n]` with coefficients `[field, m, n]`.
    fn sum(&self, functions: &Tensor, coefficients: &Tensor) -> Result<Tensor> {
        let waves = functions.f_bmm(&by_wave(coefficients, [1, 2, 0, 3])?)?;
        let waves = from_waves(&waves, [2, 1, 0, 3])?;
        Ok(waves.f_fft_irfft(self.longitudes as i64, -1, "forward")?)
    }
}

/// A grid on Gaussian latitudes, on which products of two fields are free of aliases, so that fields have coefficients.
#[derive(Debug)]
pub(super) struct GaussianGrid {
    grid: Grid,
    sines: Vec<f64>,
    /// Legendre functions times weights, `[m, l, latitude]`.
    analysis: Tensor,
    /// Legendre functions and (1 − μ²) dP/dμ times weights / (1 − μ²), `[m, 2 l, latitude]`.
    vector_analysis: Tensor,
}

impl GaussianGrid {
    /// Chooses the latitudes and longitudes for a truncation.
    pub(super) fn new(truncation: usize) -> Result<Self> {
        let longitudes = points_for_fft(3 * truncation + 1);
        let (sines, weights) = gauss_legendre(longitudes / 2);
        let grid = Grid::new(truncation, &sines, longitudes)?;
        let for_vectors: Vec<f64> =
            sines.iter().zip(&weights).map(|(sine, weight)| weight / (1.0 - sine * sine)).collect();
        let weighted = |functions: &Tensor, weights: &[f64]| -> Result<Tensor> {
            Ok(functions.f_transpose(1, 2)?.f_mul(&Tensor::f_from_slice(weights)?)?.f_contiguous()?)
        };
        let analysis = weighted(&grid.values, &weights)?;
        let vector_analysis = weighted(&grid.values_and_slopes, &for_vectors)?;
        Ok(Self { grid, sines, analysis, vector_analysis })
    }

    /// The grid, for the evaluation of fields.
    pub(super) fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Sines of the latitudes, from north to south.
    pub(super) fn sines(&self) -> &[f64] {
        &self.sines
    }

    /// Number of longitudes.
    pub(super) fn longitudes(&self) -> usize {
        self.grid.longitudes
    }

    /// Computes the coefficients of fields, `[field, latitude, longitude]`.
    pub(super) fn coefficients(&self, fields: &Tensor) -> Result<Tensor> {
        self.project(&self.analysis, fields)
    }

    /// Computes the coefficients of the divergence and of the curl, each `[vector, m, l]`, of vectors
    /// `[vector, 2, latitude, longitude]`: their eastward and northward components times cos φ.
    pub(super) fn divergence_and_curl(&self, vectors: &Tensor) -> Result<[Tensor; 2]> {
        let orders = self.analysis.size()[0];
        let parts = self.project(&self.vector_analysis, &vectors.f_flatten(0, 1)?)?;
        let parts = parts.f_view([-1, 2, orders, 2, orders])?;
        // By parts: the derivative along latitudes moves to the Legendre functions.
        let part = |component: i64, of: i64| -> Result<Tensor> {
            Ok(parts.f_select(1, component)?.f_select(2, of)?)
        };
        let eastward =
            |component: i64| -> Result<Tensor> { Ok(self.grid.eastward.f_mul(&part(component, 0)?)?) };
        Ok([eastward(0)?.f_sub(&part(1, 1)?)?, eastward(1)?.f_add(&part(0, 1)?)?])
    }

    /// Projects fields on functions `[m, n, latitude]`; returns `[field, m, n]`.
    fn project(&self, functions: &Tensor, fields: &Tensor) -> Result<Tensor> {
        let waves = fields.f_fft_rfft(None, -1, "forward")?.f_narrow(2, 0, functions.size()[0])?;
        from_waves(&functions.f_bmm(&by_wave(&waves, [2, 1, 0, 3])?)?, [2, 0, 1, 3])
    }
}

/// Permutes complex `[a, b, c]` as if it were real `[a, b, c, 2]`, and joins the last two dims: the real matrices multiply both parts.
fn by_wave(waves: &Tensor, dims: [i64; 4]) -> Result<Tensor> {
    Ok(waves.f_view_as_real()?.f_permute(dims)?.f_flatten(2, 3)?)
}

/// Splits the last dim into fields and the two parts, permutes, and returns complex numbers.
fn from_waves(waves: &Tensor, dims: [i64; 4]) -> Result<Tensor> {
    let [orders, points] = [0, 1].map(|dim| waves.size()[dim]);
    Ok(waves.f_view([orders, points, -1, 2])?.f_permute(dims)?.f_contiguous()?.f_view_as_complex()?)
}

/// The smallest even number from `least` on without prime factors above 5.
fn points_for_fft(least: usize) -> usize {
    let is_smooth = |points: &usize| {
        let rest = [2, 3, 5].iter().fold(*points, |mut rest, prime| {
            while rest.is_multiple_of(*prime) {
                rest /= prime;
            }
            rest
        });
        points.is_multiple_of(2) && rest == 1
    };
    // A power of two lies below twice the least.
    (least..=2 * least).find(is_smooth).unwrap_or(2 * least)
}
