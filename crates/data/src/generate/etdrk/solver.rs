//! Exponential time differencing Runge–Kutta methods.

use std::f64::consts::TAU;

use tch::{Kind, Tensor};

use super::registry::SystemKind;
use super::spectrum::{Domain, Spectrum};
use super::system::System;
use crate::{Error, Result};

/// Integrates a [`System`](super::System) in time: û' = L û + N(û), with the linear part exact and the nonlinear part by a
/// Runge–Kutta method of order 1 to 4.
///
/// The methods are those of Cox and Matthews, "Exponential Time Differencing for Stiff Systems", J. Comput. Phys. 176 (2002);
/// their coefficients are means over circles in the complex plane, as in Kassam and Trefethen, "Fourth-Order Time-Stepping for
/// Stiff PDEs", SIAM J. Sci. Comput. 26 (2005). Products are free of aliases: N sees and gives the modes below
/// points / (degree + 1) alone. All numbers are float64.
///
/// ```
/// use isobar_data::generate::etdrk::{Diffusion, Domain, Solver};
/// use tch::Tensor;
///
/// let domain = Domain { dims: 1, points: 16, length: 1.0 };
/// let solver = Solver::new(&Diffusion { diffusivity: 0.1 }.into(), domain, 0.5, 1)?;
/// let wave = (Tensor::from_slice(&domain.coordinates()) * std::f64::consts::TAU).sin().view([1, 1, 16]);
/// let later = solver.solve(&wave, 2)?; // 2 steps of 0.5
/// let exact = (-0.1 * std::f64::consts::TAU.powi(2)).exp() * wave;
/// assert!(later.allclose(&exact, 0.0, 1e-14, false));
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Debug)]
pub struct Solver {
    system: SystemKind,
    spectrum: Spectrum,
    /// e^(hL).
    full: Tensor,
    /// Coefficients of the nonlinear part, if there is one.
    stages: Option<Stages>,
}

/// Coefficients of the nonlinear part of a step h.
#[derive(Debug)]
struct Stages {
    order: usize,
    mask: Tensor,
    /// e^(hL/2).
    half: Tensor,
    /// (e^(z/2) − 1) / z · h, for z = hL.
    to_half: Tensor,
    /// h φ₁, h φ₂ for orders 1 and 2; of orders 3 and 4 the weights of the first, the middle and the last stage.
    weights: [Tensor; 3],
    /// h φ₁.
    to_full: Tensor,
}

impl Solver {
    /// Makes the coefficients of a time step of a method of order 1, 2, 3 or 4.
    ///
    /// # Errors
    /// A domain or settings that the system does not have, a step that is not finite and above 0, another order, or memory
    /// that cannot be allocated.
    pub fn new(system: &SystemKind, domain: Domain, step: f64, order: usize) -> Result<Self> {
        check(system, domain, step, order)?;
        let spectrum = Spectrum::new(domain)?;
        let z = system.linear(&spectrum)?.f_to_kind(Kind::ComplexDouble)?.f_mul_scalar(step)?;
        let full = z.f_exp()?;
        let degree = system.degree();
        let stages = match degree {
            0 | 1 => None,
            _ => Some(Stages::new(&z, step, order, spectrum.mask(degree)?)?),
        };
        Ok(Self { system: system.clone(), spectrum, full, stages })
    }

    /// The grid, and derivatives on it.
    pub fn spectrum(&self) -> &Spectrum {
        &self.spectrum
    }

    /// Advances fields by some steps: `[sample, channel, x, …]` in float64.
    ///
    /// # Errors
    /// Fields of another shape. Values that are not finite are not looked for.
    pub fn solve(&self, fields: &Tensor, steps: usize) -> Result<Tensor> {
        let mut hat = self.spectrum.forward(&fields.f_to_kind(Kind::Double)?)?;
        for _ in 0..steps {
            hat = self.step(&hat)?;
        }
        self.spectrum.inverse(&hat)
    }

    /// One step of coefficients, `[sample, channel, kx, …]`.
    ///
    /// # Errors
    /// Coefficients of another shape.
    pub fn step(&self, v: &Tensor) -> Result<Tensor> {
        let Some(stages) = &self.stages else { return Ok(v.f_mul(&self.full)?) };
        let of = |v: &Tensor| stages.nonlinear(&*self.system, &self.spectrum, v);
        let Stages { order, half, to_half, to_full, weights: [first, middle, last], .. } = stages;
        let n_v = of(v)?;
        let free = v.f_mul(&self.full)?;
        if *order <= 2 {
            let a = free.f_add(&to_full.f_mul(&n_v)?)?;
            return if *order == 1 { Ok(a) } else { Ok(a.f_add(&middle.f_mul(&of(&a)?.f_sub(&n_v)?)?)?) };
        }
        let mid = v.f_mul(half)?;
        let a = mid.f_add(&to_half.f_mul(&n_v)?)?;
        let n_a = of(&a)?;
        let (n_middle, n_last) = if *order == 3 {
            let b = free.f_add(&to_full.f_mul(&n_a.f_mul_scalar(2.0)?.f_sub(&n_v)?)?)?;
            (n_a.f_mul_scalar(2.0)?, of(&b)?)
        } else {
            let n_b = of(&mid.f_add(&to_half.f_mul(&n_a)?)?)?;
            let c = a.f_mul(half)?.f_add(&to_half.f_mul(&n_b.f_mul_scalar(2.0)?.f_sub(&n_v)?)?)?;
            (n_a.f_add(&n_b)?, of(&c)?)
        };
        Ok(free
            .f_add(&first.f_mul(&n_v)?)?
            .f_add(&middle.f_mul(&n_middle)?.f_mul_scalar(2.0)?)?
            .f_add(&last.f_mul(&n_last)?)?)
    }
}

/// Checks what [`Solver::new`] takes.
pub(super) fn check(system: &SystemKind, domain: Domain, step: f64, order: usize) -> Result<()> {
    domain.check()?;
    system.check(&domain)?;
    if !(step.is_finite() && step > 0.0) {
        return Err(Error::Invalid(format!(
            "the time step is {step}, expected a finite number above 0; --set dt=0.1"
        )));
    }
    if !(1..=4).contains(&order) {
        return Err(Error::Invalid(format!("order is {order}, expected 1 to 4; --set order=4")));
    }
    Ok(())
}

impl Stages {
    fn new(z: &Tensor, step: f64, order: usize, mask: Tensor) -> Result<Self> {
        let half = z.f_mul_scalar(0.5)?.f_exp()?;
        let h = |mean: Tensor| -> Result<Tensor> { Ok(mean.f_mul_scalar(step)?) };
        // (e^(r/2) − 1) / r and (e^r − 1) / r
        let to_half = h(mean(z, |r| {
            let half = r.f_mul_scalar(0.5)?.f_exp()?;
            Ok(half.f_sub_scalar(1.0)?.f_div(r)?)
        })?)?;
        let to_full = h(mean(z, |r| Ok(r.f_exp()?.f_sub_scalar(1.0)?.f_div(r)?))?)?;
        let weights = if order <= 2 {
            // (e^r − 1 − r) / r²
            let second = mean(z, |r| Ok(r.f_exp()?.f_sub_scalar(1.0)?.f_sub(r)?.f_div(&power(r, 2)?)?))?;
            [to_full.shallow_clone(), h(second)?, to_full.shallow_clone()]
        } else {
            // Each is (a + b r + c r² + e^r (d + e r + f r²)) / r³.
            let weight = |polynomials: [f64; 6]| h(mean(z, |r| cubic(r, polynomials))?);
            [
                weight([-4.0, -1.0, 0.0, 4.0, -3.0, 1.0])?,
                weight([2.0, 1.0, 0.0, -2.0, 1.0, 0.0])?,
                weight([-4.0, -3.0, -1.0, 4.0, -1.0, 0.0])?,
            ]
        };
        Ok(Self { order, mask, half, to_half, weights, to_full })
    }

    /// The nonlinear part, without aliases.
    fn nonlinear(&self, system: &dyn System, spectrum: &Spectrum, hat: &Tensor) -> Result<Tensor> {
        Ok(system.nonlinear(spectrum, &hat.f_mul(&self.mask)?)?.f_mul(&self.mask)?)
    }
}

fn power(r: &Tensor, exponent: i64) -> Result<Tensor> {
    let mut product = r.shallow_clone();
    for _ in 1..exponent {
        product = product.f_mul(r)?;
    }
    Ok(product)
}

/// (a + b r + c r² + e^r (d + e r + f r²)) / r³.
fn cubic(r: &Tensor, [a, b, c, d, e, f]: [f64; 6]) -> Result<Tensor> {
    // By Horner: (c r + b) r + a.
    let parabola = |a: f64, b: f64, c: f64| -> Result<Tensor> {
        Ok(r.f_mul_scalar(c)?.f_add_scalar(b)?.f_mul(r)?.f_add_scalar(a)?)
    };
    Ok(parabola(a, b, c)?.f_add(&parabola(d, e, f)?.f_mul(&r.f_exp()?)?)?.f_div(&power(r, 3)?)?)
}

/// The value at z of an analytic function: its mean over points on a circle around z, where it has no cancellation.
fn mean(z: &Tensor, function: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for point in 0..POINTS {
        let angle = TAU * (f64::from(point) + 0.5) / f64::from(POINTS);
        let (real, imaginary) = (Tensor::from(angle.cos()), Tensor::from(angle.sin()));
        let value = function(&z.f_add(&Tensor::f_complex(&real, &imaginary)?)?)?;
        sum = Some(match sum {
            Some(sum) => sum.f_add(&value)?,
            None => value,
        });
    }
    match sum {
        Some(sum) => Ok(sum.f_div_scalar(f64::from(POINTS))?),
        None => Ok(z.f_zeros_like()?),
    }
}

/// Points on the circle, as of Kassam and Trefethen.
const POINTS: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    /// Their Taylor series at 0, where the formulas themselves are 0 / 0.
    #[test]
    fn coefficients_at_zero_are_those_of_runge_kutta() {
        let z = Tensor::zeros([1], (Kind::ComplexDouble, tch::Device::Cpu));
        let of = |order| Stages::new(&z, 0.5, order, Tensor::from(1.0)).unwrap();
        let near = |tensor: &Tensor, value: f64| {
            let error =
                (tensor.real() - value).abs().double_value(&[0]) + tensor.imag().abs().double_value(&[0]);
            assert!(error < 1e-15, "{error}");
        };
        let stages = of(4);
        near(&stages.to_half, 0.25);
        near(&stages.to_full, 0.5);
        // h/6, h/6 twice each of two, h/6.
        stages.weights.iter().for_each(|weight| near(weight, 0.5 / 6.0));
        near(&of(2).weights[1], 0.25);
    }

    #[test]
    fn coefficients_away_from_zero_are_the_formulas() {
        let z = -30.0_f64;
        let at = Tensor::from_slice(&[z]).to_kind(Kind::ComplexDouble);
        let stages = Stages::new(&at, 1.0, 3, Tensor::from(1.0)).unwrap();
        let exact = (-4.0 - z + z.exp() * (4.0 - 3.0 * z + z * z)) / z.powi(3);
        assert!((stages.weights[0].real().double_value(&[0]) / exact - 1.0).abs() < 1e-14);
        assert!((stages.to_full.real().double_value(&[0]) / ((z.exp() - 1.0) / z) - 1.0).abs() < 1e-14);
    }
}
