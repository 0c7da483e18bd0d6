//! The shallow-water equations on a rotating sphere.

use tch::Tensor;

use super::transform::{GaussianGrid, Grid};
use crate::Result;

/// Radius of the sphere in m.
pub(super) const RADIUS: f64 = 6.37122e6;
/// Angular velocity of the sphere in 1/s.
pub(super) const ROTATION: f64 = 7.292e-5;
/// Acceleration of gravity in m/s².
pub(super) const GRAVITY: f64 = 9.80616;

/// A spectral model of the shallow-water equations on a rotating sphere with a flat bottom:
///
/// ζ' = −∇·((ζ + f) V), δ' = k·∇×((ζ + f) V) − Δ(g h + |V|²/2), h' = −∇·(h V), f = 2 Ω sin φ,
///
/// and −K Δ² of ζ and δ. A state is the coefficients of vorticity ζ (1/s), divergence δ (1/s) and depth h (m), `[3, m, l]`; see
/// [`Grid`]. Products are free of aliases. A time step is one of the classical Runge–Kutta method of order 4, and then the exact decay by
/// K Δ².
#[derive(Debug)]
pub(super) struct Model {
    sphere: GaussianGrid,
    /// f on the grid in 1/s, `[latitude, 1]`.
    pub(super) coriolis: Tensor,
    /// 1 / (2 cos² φ), `[latitude, 1]`.
    half_secant_squared: Tensor,
    inverse_laplacian: Tensor,
    laplacian: Tensor,
    /// Time step in s.
    dt: f64,
    /// Decay of a state by K Δ² in a time step, `[3, 1, l]`.
    decay: Tensor,
}

impl Model {
    /// Makes a model of a truncation with a time step in s and a coefficient K in m⁴/s.
    pub(super) fn new(truncation: usize, dt: f64, hyperdiffusion: f64) -> Result<Self> {
        let sphere = GaussianGrid::new(truncation)?;
        let on_latitudes = |of: &dyn Fn(f64) -> f64| -> Result<Tensor> {
            let values: Vec<f64> = sphere.sines().iter().map(|&sine| of(sine)).collect();
            Ok(Tensor::f_from_slice(&values)?.f_unsqueeze(1)?)
        };
        let coriolis = on_latitudes(&|sine| 2.0 * ROTATION * sine)?;
        let half_secant_squared = on_latitudes(&|sine| 0.5 / (1.0 - sine * sine))?;
        let decay = of_degrees(truncation, |l| (-hyperdiffusion * eigenvalue(l).powi(2) * dt).exp())?;
        let decay = Tensor::f_stack(&[&decay, &decay, &decay.f_ones_like()?], 0)?.f_unsqueeze(1)?;
        Ok(Self {
            sphere,
            coriolis,
            half_secant_squared,
            inverse_laplacian: inverse_laplacian(truncation)?,
            laplacian: of_degrees(truncation, eigenvalue)?,
            dt,
            decay,
        })
    }

    /// The grid of the model.
    pub(super) fn sphere(&self) -> &GaussianGrid {
        &self.sphere
    }

    /// Computes the changes of a state in 1 s, without diffusion.
    pub(super) fn tendencies(&self, state: &Tensor) -> Result<Tensor> {
        let grid = self.sphere.grid();
        let scalars = Tensor::f_stack(&[&state.f_get(VORTICITY)?, &state.f_get(DEPTH)?], 0)?;
        let scalars = grid.fields(&scalars)?;
        let wind = wind(grid, &self.inverse_laplacian, state)?;
        let absolute_vorticity = scalars.f_get(0)?.f_add(&self.coriolis)?;
        let carried = Tensor::f_stack(&[&absolute_vorticity, &scalars.f_get(1)?], 0)?;
        let fluxes = carried.f_unsqueeze(1)?.f_mul(&wind)?;
        let [divergence, curl] = self.sphere.divergence_and_curl(&fluxes)?;
        let energy = wind.f_square()?.f_sum_dim_intlist(0, true, None)?.f_mul(&self.half_secant_squared)?;
        let energy = self.sphere.coefficients(&energy)?.f_get(0)?;
        let head = state.f_get(DEPTH)?.f_mul_scalar(GRAVITY)?.f_add(&energy)?;
        let convergence = divergence.f_mul_scalar(-1.0 / RADIUS)?;
        let spin = curl.f_get(0)?.f_mul_scalar(1.0 / RADIUS)?.f_sub(&self.laplacian.f_mul(&head)?)?;
        Ok(Tensor::f_stack(&[convergence.f_get(0)?, spin, convergence.f_get(1)?], 0)?)
    }

    /// Advances a state by a time step.
    pub(super) fn step(&self, state: &Tensor) -> Result<Tensor> {
        let ahead = |slope: &Tensor, time: f64| state.f_add(&slope.f_mul_scalar(time)?);
        let first = self.tendencies(state)?;
        let second = self.tendencies(&ahead(&first, self.dt / 2.0)?)?;
        let third = self.tendencies(&ahead(&second, self.dt / 2.0)?)?;
        let last = self.tendencies(&ahead(&third, self.dt)?)?;
        let sum = first.f_add(&second.f_add(&third)?.f_mul_scalar(2.0)?)?.f_add(&last)?;
        Ok(ahead(&sum, self.dt / 6.0)?.f_mul(&self.decay)?)
    }

    /// Computes the vorticity in 1/s, `[m, l]`, of a wind on the grid: its components times cos φ in m/s, `[2, latitude, longitude]`.
    pub(super) fn vorticity(&self, wind: &Tensor) -> Result<Tensor> {
        let [_, curl] = self.sphere.divergence_and_curl(&wind.f_unsqueeze(0)?)?;
        Ok(curl.f_get(0)?.f_mul_scalar(1.0 / RADIUS)?)
    }

    /// Returns the depth in m, as coefficients without a mean, that a wind without divergence needs to stay without divergence.
    pub(super) fn balanced_depth(&self, vorticity: &Tensor) -> Result<Tensor> {
        let zero = vorticity.f_zeros_like()?;
        let state = Tensor::f_stack(&[vorticity, &zero, &zero], 0)?;
        let spin = self.tendencies(&state)?.f_get(DIVERGENCE)?;
        Ok(spin.f_mul(&self.inverse_laplacian)?.f_mul_scalar(1.0 / GRAVITY)?)
    }
}

/// Indices of the fields of a state.
pub(super) const VORTICITY: i64 = 0;
pub(super) const DIVERGENCE: i64 = 1;
pub(super) const DEPTH: i64 = 2;

/// Coefficients of the inverse of the Laplacian in m², `[l]`; 0 for the mean.
pub(super) fn inverse_laplacian(truncation: usize) -> Result<Tensor> {
    of_degrees(truncation, |l| if l > 0.0 { 1.0 / eigenvalue(l) } else { 0.0 })
}

/// Evaluates the wind of a state: its eastward and northward components times cos φ in m/s, `[2, latitude, longitude]`.
pub(super) fn wind(grid: &Grid, inverse_laplacian: &Tensor, state: &Tensor) -> Result<Tensor> {
    let potentials = state.f_narrow(0, VORTICITY, 2)?.f_mul(inverse_laplacian)?;
    Ok(grid
        .vector(&potentials.f_get(VORTICITY)?, &potentials.f_get(DIVERGENCE)?)?
        .f_mul_scalar(1.0 / RADIUS)?)
}

/// Eigenvalue of the Laplacian in 1/m² for harmonics of degree l.
pub(super) fn eigenvalue(l: f64) -> f64 {
    -l * (l + 1.0) / (RADIUS * RADIUS)
}

/// A number for each degree, `[l]`.
fn of_degrees(truncation: usize, of: impl Fn(f64) -> f64) -> Result<Tensor> {
    let numbers: Vec<f64> = (0..=truncation).map(|l| of(l as f64)).collect();
    Ok(Tensor::f_from_slice(&numbers)?)
}
