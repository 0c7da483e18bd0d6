//! Calculus on periodic fields, by Fourier transforms.
//!
//! A field of n points along a dim stands for a function of period L that is known at 0, L/n, 2L/n, …; everything here is exact
//! for functions of frequencies below n/2. Written once over [`Array`]: of a sharded tensor the dims may
//! be split.
//!
//! ```
//! use isobar_array::periodic;
//! use tch::{Device, Kind, Tensor};
//!
//! let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) / 16.0;
//! let wave = (&x * std::f64::consts::TAU).sin();
//! let slope = periodic::derivative(&wave, 0, 1.0, 1)?;
//! let want = (&x * std::f64::consts::TAU).cos() * std::f64::consts::TAU;
//! assert!((slope - want).abs().max().double_value(&[]) < 1e-12);
//! # Ok::<(), isobar_array::Error>(())
//! ```

use std::f64::consts::TAU;

use tch::{Device, Kind, Tensor};

use crate::array::{Array, FftNorm, Unary, resolve};
use crate::error::{Result, argument, named};

/// The dims of a field that are periodic, and their periods.
#[derive(Debug, Clone)]
pub struct Domain {
    /// The dims.
    pub dims: Vec<i64>,
    /// The period along each.
    pub lengths: Vec<f64>,
}

impl Domain {
    /// The dims, all of period 2π, so that wave numbers are whole.
    ///
    /// ```
    /// use isobar_array::periodic::Domain;
    ///
    /// let domain = Domain::unit(&[-2, -1]);
    /// assert_eq!(domain.lengths, [std::f64::consts::TAU; 2]);
    /// ```
    pub fn unit(dims: &[i64]) -> Self {
        Self { dims: dims.to_vec(), lengths: vec![TAU; dims.len()] }
    }
}

/// The wave numbers along the dims of a half spectrum: for each dim a vector that stands along it, beside dims of extent 1.
struct Waves {
    vectors: Vec<Tensor>,
    points: Vec<i64>,
}

impl Waves {
    fn of<A: Array>(op: &'static str, field: &A, domain: &Domain) -> Result<Self> {
        let shape = field.shape();
        if domain.dims.is_empty() || domain.dims.len() != domain.lengths.len() {
            let (dims, lengths) = (domain.dims.len(), domain.lengths.len());
            return Err(argument(
                op,
                format!("{dims} dims and {lengths} periods; expected one for each dim"),
            ));
        }
        if let Some(length) = domain.lengths.iter().find(|length| !length.is_finite() || **length <= 0.0) {
            return Err(argument(op, format!("a period of {length}; expected more than 0")));
        }
        let dims: Vec<usize> =
            domain.dims.iter().map(|&dim| resolve(op, dim, shape.len())).collect::<Result<_>>()?;
        let points: Vec<i64> = dims.iter().map(|&dim| shape[dim]).collect();
        let vector = |(index, (&dim, &length)): (usize, (&usize, &f64))| {
            let n = points[index];
            let halved = index + 1 == dims.len();
            let count = if halved { n / 2 + 1 } else { n };
            let number = |k: i64| if halved || 2 * k <= n { k } else { k - n };
            let waves: Vec<f64> = (0..count).map(|k| number(k) as f64 * TAU / length).collect();
            let mut view = vec![1; shape.len()];
            view[dim] = count;
            named(op, &[], Tensor::f_from_slice(&waves).and_then(|waves| waves.f_reshape(view)))
        };
        let vectors = dims.iter().zip(&domain.lengths).enumerate().map(vector).collect::<Result<_>>()?;
        Ok(Self { vectors, points })
    }

    /// The squared length of the wave vector of every mode.
    fn squared(&self, op: &'static str) -> Result<Tensor> {
        let sum = || {
            let zero = Tensor::f_zeros([1], (Kind::Double, Device::Cpu))?;
            self.vectors.iter().try_fold(zero, |sum, vector| sum.f_add(&vector.f_square()?))
        };
        named(op, &[], sum())
    }
}

/// A field whose modes are multiplied by real numbers.
fn filtered<A: Array>(field: &A, domain: &Domain, points: &[i64], factors: &Tensor) -> Result<A> {
    let spectrum = field.rfftn(&[], &domain.dims, FftNorm::Backward)?;
    let factors = named("periodic", &[factors], factors.f_to_kind(field.kind()))?;
    let spectrum = spectrum.mul(&spectrum.constant(&factors)?)?;
    spectrum.irfftn(points, &domain.dims, FftNorm::Backward)?.redistribute_like(field)
}

/// The derivative of that order along a dim of period `length`. Of an odd order, the mode of the highest frequency, whose
/// derivative vanishes at all points, is dropped.
///
/// # Errors
///
/// A dim that does not exist, an order below 0, dtypes below single precision.
pub fn derivative<A: Array>(field: &A, dim: i64, length: f64, order: i32) -> Result<A> {
    const OP: &str = "derivative";
    if order < 0 {
        return Err(argument(OP, format!("order {order}; expected 0 or more")));
    }
    let domain = Domain { dims: vec![dim], lengths: vec![length] };
    let waves = Waves::of(OP, field, &domain)?;
    let n = waves.points[0];
    let factors = || {
        let factors = waves.vectors[0].f_pow_tensor_scalar(i64::from(order))?;
        if order % 2 == 1 && n % 2 == 0 {
            let last = waves.vectors[0].f_ge(TAU / length * (n as f64 / 2.0 - 0.25))?;
            return factors.f_masked_fill(&last, 0.0);
        }
        Ok(factors)
    };
    let factors = named(OP, &[], factors())?;
    // iᵒʳᵈᵉʳ: real for even orders; for odd ones, (re, im) becomes (−im, re).
    let sign = if order % 4 >= 2 { -1.0 } else { 1.0 };
    let factors = named(OP, &[&factors], factors.f_mul_scalar(sign))?;
    if order % 2 == 0 {
        return filtered(field, &domain, &[n], &factors);
    }
    let spectrum = field.rfftn(&[], &[dim], FftNorm::Backward)?;
    let factors = named(OP, &[&factors], factors.f_to_kind(field.kind()))?;
    let scaled = spectrum.mul(&spectrum.constant(&factors)?)?.view_as_real()?;
    let (re, im) = (scaled.select(-1, 0)?, scaled.select(-1, 1)?);
    let rotated = A::stack(&[&im.unary(Unary::Neg)?, &re], -1)?.view_as_complex()?;
    rotated.irfftn(&[n], &[dim], FftNorm::Backward)?.redistribute_like(field)
}

/// The sum of the second derivatives.
///
/// # Errors
///
/// Dims that do not exist, not a period for each, dtypes below single precision.
///
/// ```
/// use isobar_array::periodic::{Domain, laplacian};
/// use tch::{Device, Kind, Tensor};
///
/// // Δ sin 2x = −4 sin 2x
/// let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
/// let wave = (x * 2.0).sin();
/// let y = laplacian(&wave, &Domain::unit(&[0]))?;
/// assert!(y.allclose(&(wave * -4.0), 1e-9, 1e-9, false));
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn laplacian<A: Array>(field: &A, domain: &Domain) -> Result<A> {
    const OP: &str = "laplacian";
    let waves = Waves::of(OP, field, domain)?;
    let factors = waves.squared(OP)?;
    let factors = named(OP, &[&factors], factors.f_neg())?;
    filtered(field, domain, &waves.points, &factors)
}

/// The field of mean zero whose [`laplacian`] is the given one, of which the mean is dropped.
///
/// # Errors
///
/// See [`laplacian`].
///
/// ```
/// use isobar_array::periodic::{Domain, inverse_laplacian, laplacian};
/// use tch::{Device, Kind, Tensor};
///
/// // The pressure of Δp = f, for an f of mean zero.
/// let f = Tensor::rand([8, 8], (Kind::Double, Device::Cpu));
/// let f = &f - f.mean(Kind::Double);
/// let p = inverse_laplacian(&f, &Domain::unit(&[0, 1]))?;
/// assert!(laplacian(&p, &Domain::unit(&[0, 1]))?.allclose(&f, 1e-9, 1e-9, false));
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn inverse_laplacian<A: Array>(field: &A, domain: &Domain) -> Result<A> {
    const OP: &str = "inverse_laplacian";
    let waves = Waves::of(OP, field, domain)?;
    let squared = waves.squared(OP)?;
    let inverse = || {
        let mean = squared.f_eq(0.0)?;
        squared.f_masked_fill(&mean, 1.0)?.f_reciprocal()?.f_neg()?.f_masked_fill(&mean, 0.0)
    };
    let factors = named(OP, &[&squared], inverse())?;
    filtered(field, domain, &waves.points, &factors)
}

/// The field whose modes of wave vector k are multiplied by (1 + |k|²)^(−s/2): (1 − Δ)^(−s/2), the Bessel potential of order
/// `s`. A negative order weights short waves more.
///
/// # Errors
///
/// See [`laplacian`].
///
/// ```
/// use isobar_array::periodic::{Domain, bessel_potential};
/// use tch::{Device, Kind, Tensor};
///
/// // cos 3x is divided by (1 + 3²)^(2/2) = 10.
/// let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
/// let wave = (x * 3.0).cos();
/// let y = bessel_potential(&wave, &Domain::unit(&[0]), 2.0)?;
/// assert!(y.allclose(&(wave / 10.0), 1e-9, 1e-9, false));
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn bessel_potential<A: Array>(field: &A, domain: &Domain, s: f64) -> Result<A> {
    const OP: &str = "bessel_potential";
    let waves = Waves::of(OP, field, domain)?;
    let squared = waves.squared(OP)?;
    let factors = squared.f_add_scalar(1.0).and_then(|sum| sum.f_pow_tensor_scalar(-s / 2.0));
    filtered(field, domain, &waves.points, &named(OP, &[&squared], factors)?)
}

/// Without the modes whose wave vector is longer than `most`.
///
/// # Errors
///
/// See [`laplacian`].
///
/// ```
/// use isobar_array::periodic::{Domain, low_pass};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
/// let (long, short) = (x.sin(), (&x * 5.0).sin());
/// let y = low_pass(&(&long + short), &Domain::unit(&[0]), 2.0)?;
/// assert!(y.allclose(&long, 1e-9, 1e-9, false));
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn low_pass<A: Array>(field: &A, domain: &Domain, most: f64) -> Result<A> {
    const OP: &str = "low_pass";
    let waves = Waves::of(OP, field, domain)?;
    let squared = waves.squared(OP)?;
    // A rounding error must not decide.
    let factors = squared.f_le(most * most * (1.0 + 1e-12)).and_then(|pass| pass.f_to_kind(Kind::Double));
    filtered(field, domain, &waves.points, &named(OP, &[&squared], factors)?)
}

/// The field on another number of points along each of `dims`: the trigonometric interpolation, or, to fewer points, without
/// the frequencies that these do not carry.
///
/// # Errors
///
/// Dims that do not exist, no points, dtypes below single precision.
///
/// ```
/// use isobar_array::periodic::resample;
/// use tch::{Device, Kind, Tensor};
///
/// let wave = |points: i64| {
///     let x = Tensor::arange(points, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / points as f64);
///     x.sin()
/// };
/// assert!(resample(&wave(8), &[0], &[12])?.allclose(&wave(12), 1e-9, 1e-9, false));
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn resample<A: Array>(field: &A, dims: &[i64], points: &[i64]) -> Result<A> {
    const OP: &str = "resample";
    if dims.len() != points.len() || points.iter().any(|&points| points < 1) {
        let reason = format!("{points:?} points along dims {dims:?}; expected at least 1 for each dim");
        return Err(argument(OP, reason));
    }
    let mut result = field.shallow_clone();
    for (&dim, &to) in dims.iter().zip(points) {
        let from = result.extent(dim)?;
        if from == to {
            continue;
        }
        let fewest = from.min(to);
        let modes = result.rfft(None, dim, FftNorm::Forward)?.narrow(dim, 0, fewest / 2 + 1)?;
        // The highest frequency of an even number of points stands for itself and its mirror image.
        let scale = if to < from { 2.0 } else { 0.5 };
        let modes = match fewest % 2 {
            0 => {
                let last = modes.narrow(dim, fewest / 2, 1)?.mul_scalar(scale)?;
                A::cat(&[&modes.narrow(dim, 0, fewest / 2)?, &last], dim)?
            }
            _ => modes,
        };
        result = modes.irfft(Some(to), dim, FftNorm::Forward)?;
    }
    Ok(result)
}

/// Computes the energy spectrum: the mean of half the square of a field by wave number, of shape `[…, shells]` for the field's
/// other dims `[…]`. Shell s holds the modes whose wave vector, in units of the lowest mode of a period of 2π, has a length
/// that rounds to s. The shells add up to the mean.
///
/// # Errors
///
/// Dims that do not exist or are not the last ones, dtypes below single precision.
///
/// ```
/// use isobar_array::periodic::energy_spectrum;
/// use tch::{Device, Kind, Tensor};
///
/// // 2 sin 3x has the mean energy 1, all of it in shell 3.
/// let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
/// let energy = energy_spectrum(&((x * 3.0).sin() * 2.0), &[0])?;
/// assert_eq!(energy.size(), [9]);
/// assert!((energy.double_value(&[3]) - 1.0).abs() < 1e-9);
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn energy_spectrum<A: Array>(field: &A, dims: &[i64]) -> Result<A> {
    const OP: &str = "energy_spectrum";
    let shape = field.shape();
    let first = shape.len().saturating_sub(dims.len());
    let resolved: Vec<usize> =
        dims.iter().map(|&dim| resolve(OP, dim, shape.len())).collect::<Result<_>>()?;
    if resolved != (first..shape.len()).collect::<Vec<_>>() {
        return Err(argument(OP, format!("dims {dims:?} are not the last of {shape:?}, in order")));
    }
    let waves = Waves::of(OP, field, &Domain::unit(dims))?;
    let lengths = waves.squared(OP)?;
    let last = shape[shape.len() - 1];
    let plan = || {
        let shells = lengths.f_sqrt()?.f_round()?.f_to_kind(Kind::Int64)?.f_reshape([-1])?;
        // Modes that stand for their mirror image too count twice.
        let columns: Vec<f64> =
            (0..=last / 2).map(|k| if k == 0 || 2 * k == last { 0.5 } else { 1.0 }).collect();
        Ok((shells, Tensor::f_from_slice(&columns)?.f_to_kind(field.kind())?))
    };
    let (shells, weights) = named(OP, &[&lengths], plan())?;
    let count = named(OP, &[&shells], shells.f_max().and_then(|most| most.f_int64_value(&[])))? + 1;
    let spectrum = field.rfftn(&[], dims, FftNorm::Forward)?.view_as_real()?;
    let power = spectrum.unary(Unary::Square)?;
    let power = power.reduce(crate::array::Reduction::Sum, &[-1], false)?;
    let power = power.mul(&power.constant(&weights)?)?;
    let before = &shape[..first];
    let power = power.reshape(&[before, &[-1]].concat())?;
    let zeros = Tensor::f_zeros([before, &[count]].concat(), (field.kind(), Device::Cpu));
    let zeros = power.constant(&named(OP, &[], zeros)?)?;
    zeros.index_add(first as i64, &power.constant(&shells)?, &power)
}
