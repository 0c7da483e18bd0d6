//! Fields on a periodic grid as Fourier coefficients.

use std::f64::consts::TAU;

use tch::{Kind, Tensor};

use crate::{Error, Result};

/// A periodic box: the interval, square or cube `[0, length)^dims` with the same number of points along each side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Domain {
    /// Number of dims, 1 to 3.
    pub dims: usize,
    /// Points along each dim, at least 4.
    pub points: usize,
    /// Length of each side.
    pub length: f64,
}

impl Domain {
    /// Checks the numbers.
    ///
    /// # Errors
    /// A number of dims or points, or a length, outside its range.
    pub fn check(&self) -> Result<()> {
        let Self { dims, points, length } = *self;
        let invalid = |what: String| Err(Error::Invalid(what));
        if !(1..=3).contains(&dims) {
            return invalid(format!("dims is {dims}, expected 1 to 3; --set dims=1"));
        }
        let all = points.checked_pow(dims as u32);
        if points < 4 || all.is_none_or(|all| all > MOST_POINTS) {
            return invalid(format!(
                "points is {points}, expected at least 4 and at most {MOST_POINTS} in all {dims} dims together; --set points=64"
            ));
        }
        if !(length.is_finite() && length > 0.0) {
            return invalid(format!(
                "length is {length}, expected a finite number above 0; --set length=1.0"
            ));
        }
        Ok(())
    }

    /// Coordinates of the points along a dim: 0, length / points, ….
    pub fn coordinates(&self) -> Vec<f64> {
        (0..self.points).map(|point| self.length * point as f64 / self.points as f64).collect()
    }
}

/// Largest number of points of a grid: 1024³.
const MOST_POINTS: usize = 1 << 30;

/// The Fourier coefficients that a real field on a [`Domain`] has, and derivatives as factors of them.
///
/// Fields are float64, `[…, x, y, z]`, and coefficients complex, `[…, kx, ky, kz]`, with the non-negative wavenumbers of the
/// last dim alone. Factors have the shape of one field's coefficients, or one that broadcasts to it.
#[derive(Debug)]
pub struct Spectrum {
    domain: Domain,
    derivatives: Vec<Tensor>,
    minus_laplacian: Tensor,
}

impl Spectrum {
    /// Makes the wavenumbers of a domain.
    ///
    /// # Errors
    /// A domain that [`Domain::check`] rejects, or memory that cannot be allocated.
    pub fn new(domain: Domain) -> Result<Self> {
        domain.check()?;
        let mut derivatives = Vec::new();
        let mut minus_laplacian = Tensor::from(0.0).f_to_kind(Kind::Double)?;
        for dim in 0..domain.dims {
            let modes = modes(domain, dim);
            let waves: Vec<f64> = modes.iter().map(|&mode| TAU * mode as f64 / domain.length).collect();
            // The derivative of the highest cosine of an even number of points is not on the grid.
            let highest = |mode: i64| {
                domain.points.is_multiple_of(2) && mode.unsigned_abs() as usize == domain.points / 2
            };
            let odd: Vec<f64> = waves
                .iter()
                .zip(&modes)
                .map(|(&wave, &mode)| if highest(mode) { 0.0 } else { wave })
                .collect();
            let squares: Vec<f64> = waves.iter().map(|wave| wave * wave).collect();
            let odd = along(domain, dim, &odd)?;
            derivatives.push(Tensor::f_complex(&odd.f_zeros_like()?, &odd)?);
            minus_laplacian = minus_laplacian.f_add(&along(domain, dim, &squares)?)?;
        }
        Ok(Self { domain, derivatives, minus_laplacian })
    }

    /// The domain.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// The factor of the first derivative along a dim, i k.
    ///
    /// # Errors
    /// A dim that the domain does not have.
    pub fn derivative(&self, dim: usize) -> Result<&Tensor> {
        self.derivatives.get(dim).ok_or_else(|| Error::OutOfRange {
            what: "dim".to_owned(),
            asked: dim.to_string(),
            available: self.domain.dims,
        })
    }

    /// The factor of the Laplacian, −|k|².
    ///
    /// # Errors
    /// Memory that cannot be allocated.
    pub fn laplacian(&self) -> Result<Tensor> {
        Ok(self.minus_laplacian.f_neg()?)
    }

    /// Coefficients of real fields.
    ///
    /// # Errors
    /// A field on another grid.
    pub fn forward(&self, fields: &Tensor) -> Result<Tensor> {
        Ok(fields.f_fft_rfftn(None::<&[i64]>, &self.axes()[..], "backward")?)
    }

    /// Real fields of coefficients.
    ///
    /// # Errors
    /// Coefficients of another grid.
    pub fn inverse(&self, coefficients: &Tensor) -> Result<Tensor> {
        let points = vec![self.domain.points as i64; self.domain.dims];
        Ok(coefficients.f_fft_irfftn(&points[..], &self.axes()[..], "backward")?)
    }

    /// 1 for the modes that a product of `degree` fields leaves free of aliases if all others are 0, else 0: modes below
    /// points / (degree + 1), which for products of two is the rule of two thirds.
    ///
    /// # Errors
    /// Memory that cannot be allocated.
    pub(super) fn mask(&self, degree: usize) -> Result<Tensor> {
        let mut mask = Tensor::from(1.0).f_to_kind(Kind::Double)?;
        for dim in 0..self.domain.dims {
            let keep = |mode: i64| mode.unsigned_abs() as usize * (degree + 1) < self.domain.points;
            let kept: Vec<f64> =
                modes(self.domain, dim).into_iter().map(|mode| f64::from(u8::from(keep(mode)))).collect();
            mask = mask.f_mul(&along(self.domain, dim, &kept)?)?;
        }
        Ok(mask)
    }

    fn axes(&self) -> Vec<i64> {
        (-(self.domain.dims as i64)..0).collect()
    }
}

/// Number of waves in the box, for each coefficient along a dim.
fn modes(domain: Domain, dim: usize) -> Vec<i64> {
    let points = domain.points as i64;
    if dim + 1 == domain.dims {
        return (0..=points / 2).collect();
    }
    (0..points).map(|at| if at <= (points - 1) / 2 { at } else { at - points }).collect()
}

/// Numbers of a dim's coefficients, as a tensor that broadcasts along the others.
fn along(domain: Domain, dim: usize, values: &[f64]) -> Result<Tensor> {
    let mut view = vec![1; domain.dims];
    view[dim] = values.len() as i64;
    Ok(Tensor::f_from_slice(values)?.f_view(&view[..])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(1, 9)]
    #[case(2, 8)]
    #[case(3, 5)]
    fn derivatives_of_waves_are_exact(#[case] dims: usize, #[case] points: usize) {
        let domain = Domain { dims, points, length: 3.0 };
        let spectrum = Spectrum::new(domain).unwrap();
        let mut phase = Tensor::from(0.3);
        for dim in 0..dims {
            phase = &phase
                + along(domain, dim, &domain.coordinates()).unwrap() * (TAU / 3.0 * (dim + 1).min(2) as f64);
        }
        let (sine, cosine) = (phase.sin(), phase.cos());
        let hat = spectrum.forward(&sine).unwrap();
        assert!(spectrum.inverse(&hat).unwrap().allclose(&sine, 0.0, 1e-13, false));
        for dim in 0..dims {
            let wave = TAU / 3.0 * (dim + 1).min(2) as f64;
            let slope = spectrum.inverse(&(&hat * spectrum.derivative(dim).unwrap())).unwrap();
            assert!(slope.allclose(&(&cosine * wave), 0.0, 1e-12, false));
        }
        let squares: f64 = (0..dims).map(|dim| (TAU / 3.0 * (dim + 1).min(2) as f64).powi(2)).sum();
        let bent = spectrum.inverse(&(&hat * spectrum.laplacian().unwrap())).unwrap();
        assert!(bent.allclose(&(&sine * -squares), 0.0, 1e-11, false));
        assert!(spectrum.derivative(dims).is_err());
    }

    #[test]
    fn two_thirds_of_the_modes_survive_a_product_of_two() {
        let spectrum = Spectrum::new(Domain { dims: 1, points: 12, length: 1.0 }).unwrap();
        let kept = |degree| Vec::<f64>::try_from(spectrum.mask(degree).unwrap()).unwrap();
        assert_eq!(kept(2), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(kept(3), [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn absurd_domains_are_errors() {
        for (dims, points, length) in [
            (0, 8, 1.0),
            (4, 8, 1.0),
            (1, 3, 1.0),
            (3, 1 << 60, 1.0),
            (1, usize::MAX, 1.0),
            (2, 8, 0.0),
            (2, 8, f64::NAN),
            (2, 8, f64::INFINITY),
        ] {
            let error = Spectrum::new(Domain { dims, points, length }).unwrap_err().to_string();
            assert!(error.contains("--set"), "{error}");
        }
    }
}
