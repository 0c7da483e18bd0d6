//! Fourier transforms.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::by_name::one;
use super::convert::as_complex;
use super::fourier::Transform;
use super::transforms::{FftAlgorithm, FftNorm, empty_transform, left_product};
use super::{Array, argument, fourier, modes, named, resolve, tables};
use crate::error::Result;
use crate::precision::in_full_precision;

/// A rectangle of a half spectrum of `height × (width / 2 + 1)` modes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Modes {
    /// Modes along the height, `0..height`.
    pub rows: Range<i64>,
    /// Modes along the width, `0..width / 2 + 1`.
    pub columns: Range<i64>,
}

/// Transforms of the last or of other dims. Below single precision there are none: convert first.
///
/// # Errors
///
/// All methods fail alike: a dtype below single precision, a dim or modes that do not exist;
/// on sharded arrays also an exchange that fails.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: dtypes below single, dims or modes that do not exist"
)]
pub trait Spectral: Sized {
    /// The spectrum over `dims` of `s` points each, to which the array is cut or filled up with zeros. No `s`, or −1 in it,
    /// means the extents; no `dims` means the last ones of `s`, and without that all.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::ones([3, 4, 6], (Kind::Double, Device::Cpu));
    /// assert_eq!(x.fftn(&[], &[1, 2], FftNorm::Backward)?.size(), [3, 4, 6]);
    /// // Filled up with zeros to 8 × 8 points.
    /// assert_eq!(x.fftn(&[8, 8], &[1, 2], FftNorm::Backward)?.size(), [3, 8, 8]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn fftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self>;

    /// The inverse of [`fftn`](Self::fftn).
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::rand([4, 6], (Kind::Double, Device::Cpu));
    /// let y = x.fftn(&[], &[0, 1], FftNorm::Ortho)?.ifftn(&[], &[0, 1], FftNorm::Ortho)?;
    /// assert!(y.real().allclose(&x, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn ifftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self>;

    /// The half spectrum of a real array, `n / 2 + 1` modes along the last of `dims`.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::ones([3, 4, 6], (Kind::Double, Device::Cpu));
    /// let spectrum = x.rfftn(&[], &[1, 2], FftNorm::Forward)?;
    /// assert_eq!((spectrum.size(), spectrum.kind()), (vec![3, 4, 4], Kind::ComplexDouble));
    /// // With the forward norm, the first mode is the mean.
    /// assert_eq!(spectrum.real().double_value(&[0, 0, 0]), 1.0);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn rfftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self>;

    /// The real inverse of [`rfftn`](Self::rfftn). Along the last of `dims` there are 2 (modes − 1) points, unless `s` says
    /// otherwise; imaginary parts of modes that are their own mirror image are dropped.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // Modes alone do not tell an odd extent from an even one.
    /// let x = Tensor::rand([4, 7], (Kind::Double, Device::Cpu));
    /// let spectrum = x.rfftn(&[], &[0, 1], FftNorm::Backward)?;
    /// assert_eq!(spectrum.irfftn(&[], &[0, 1], FftNorm::Backward)?.size(), [4, 6]);
    /// let y = spectrum.irfftn(&[4, 7], &[0, 1], FftNorm::Backward)?;
    /// assert!(y.allclose(&x, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn irfftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self>;

    /// [`fftn`](Self::fftn) over one dim.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::Tensor;
    ///
    /// let spectrum = Tensor::from_slice(&[1.0, 1.0, 1.0, 1.0]).fft(None, 0, FftNorm::Backward)?;
    /// assert!(spectrum.real().allclose(&Tensor::from_slice(&[4.0, 0.0, 0.0, 0.0]), 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn fft(&self, n: Option<i64>, dim: i64, norm: FftNorm) -> Result<Self> {
        self.fftn(n.as_slice(), &[dim], norm)
    }

    /// [`ifftn`](Self::ifftn) over one dim.
    fn ifft(&self, n: Option<i64>, dim: i64, norm: FftNorm) -> Result<Self> {
        self.ifftn(n.as_slice(), &[dim], norm)
    }

    /// [`rfftn`](Self::rfftn) over one dim.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::Tensor;
    ///
    /// // One wave of length 4 in 4 points: its power is in mode 1.
    /// let spectrum = Tensor::from_slice(&[0.0, 1.0, 0.0, -1.0]).rfft(None, 0, FftNorm::Backward)?;
    /// assert!(spectrum.abs().allclose(&Tensor::from_slice(&[0.0, 2.0, 0.0]), 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn rfft(&self, n: Option<i64>, dim: i64, norm: FftNorm) -> Result<Self> {
        self.rfftn(n.as_slice(), &[dim], norm)
    }

    /// [`irfftn`](Self::irfftn) over one dim.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0]);
    /// let y = x.rfft(None, 0, FftNorm::Backward)?.irfft(Some(5), 0, FftNorm::Backward)?;
    /// assert!(y.allclose(&x, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn irfft(&self, n: Option<i64>, dim: i64, norm: FftNorm) -> Result<Self> {
        self.irfftn(n.as_slice(), &[dim], norm)
    }

    /// [`fftn`](Self::fftn) over two dims.
    fn fft2(&self, dims: [i64; 2], norm: FftNorm) -> Result<Self> {
        self.fftn(&[], &dims, norm)
    }

    /// [`ifftn`](Self::ifftn) over two dims.
    fn ifft2(&self, dims: [i64; 2], norm: FftNorm) -> Result<Self> {
        self.ifftn(&[], &dims, norm)
    }

    /// [`rfftn`](Self::rfftn) over two dims.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::rand([1, 3, 8, 16], (Kind::Float, Device::Cpu));
    /// assert_eq!(x.rfft2([-2, -1], FftNorm::Ortho)?.size(), [1, 3, 8, 9]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn rfft2(&self, dims: [i64; 2], norm: FftNorm) -> Result<Self> {
        self.rfftn(&[], &dims, norm)
    }

    /// [`irfftn`](Self::irfftn) over two dims, to the extents `size`.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::rand([1, 3, 8, 15], (Kind::Double, Device::Cpu));
    /// let y = x.rfft2([2, 3], FftNorm::Ortho)?.irfft2([8, 15], [2, 3], FftNorm::Ortho)?;
    /// assert!(y.allclose(&x, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn irfft2(&self, size: [i64; 2], dims: [i64; 2], norm: FftNorm) -> Result<Self> {
        self.irfftn(&size, &dims, norm)
    }

    /// Only the given modes of the half spectrum over `dim` (height) and the dim after it (width), as a real array: from
    /// `[…, height, width, …]` to `[…, 2, rows, columns, …]`, real parts first.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Modes, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::rand([1, 3, 8, 16], (Kind::Double, Device::Cpu));
    /// let low = x.rfft2_modes(2, &Modes { rows: 0..2, columns: 0..3 }, FftNorm::Ortho)?;
    /// assert_eq!(low.size(), [1, 3, 2, 2, 3]);
    /// let all = x.rfft2([2, 3], FftNorm::Ortho)?;
    /// let want = all.narrow(2, 0, 2).narrow(3, 0, 3).real();
    /// assert!(low.select(2, 0).allclose(&want, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn rfft2_modes(&self, dim: i64, modes: &Modes, norm: FftNorm) -> Result<Self>
    where
        Self: Array,
    {
        let at = resolve("rfft2_modes", dim, self.shape().len())? as i64;
        let kept = [vec![modes.rows.clone()], vec![modes.columns.clone()]];
        let parts = self.rfftn_modes(&[at, at + 1], &kept, norm)?.view_as_real()?;
        let last = parts.shape().len() as i64 - 1;
        let order: Vec<i64> = (0..at).chain([last]).chain(at..last).collect();
        parts.permute(&order)
    }

    /// Back from [`rfft2_modes`](Self::rfft2_modes), whose 2 is at `dim`; all other modes are zero.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Modes, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // The first mode alone is the mean of the field.
    /// let x = Tensor::rand([1, 8, 16], (Kind::Double, Device::Cpu));
    /// let first = Modes { rows: 0..1, columns: 0..1 };
    /// let y = x.rfft2_modes(1, &first, FftNorm::Ortho)?.irfft2_modes(1, [8, 16], &first, FftNorm::Ortho)?;
    /// assert!(y.allclose(&x.mean(Kind::Double).expand_as(&x), 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn irfft2_modes(&self, dim: i64, size: [i64; 2], modes: &Modes, norm: FftNorm) -> Result<Self>
    where
        Self: Array,
    {
        let dims = self.shape().len() as i64;
        let at = resolve("irfft2_modes", dim, dims as usize)? as i64;
        let order: Vec<i64> = (0..at).chain(at + 1..dims).chain([at]).collect();
        let kept = [vec![modes.rows.clone()], vec![modes.columns.clone()]];
        self.permute(&order)?.contiguous()?.view_as_complex()?.irfftn_modes(&size, &[at, at + 1], &kept, norm)
    }

    /// Only the modes `kept` of the complex half spectrum over `dims`, the last of which is halved: along each dim those of
    /// its ranges one after another, which may overlap. `dims` stay in place, with as many modes as are kept.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // Frequencies −2 … 1 along the height, 0 … 2 along the width.
    /// let x = Tensor::rand([1, 3, 8, 16], (Kind::Double, Device::Cpu));
    /// let low = x.rfftn_modes(&[2, 3], &[vec![0..2, 6..8], vec![0..3]], FftNorm::Ortho)?;
    /// assert_eq!(low.size(), [1, 3, 4, 3]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn rfftn_modes(&self, dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Result<Self>
    where
        Self: Array,
    {
        let attrs = args!("s": Vec::<i64>::new(), "dim": dims, "kept": pairs(kept), "norm": norm.name());
        one("rfftn_modes", &[self], attrs)
    }

    /// The real inverse of [`rfftn_modes`](Self::rfftn_modes), of extents `s` along `dims`: modes that are not kept are zero,
    /// those kept several times are added, and imaginary parts are dropped as [`irfft2`](Self::irfft2) drops them.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // A low-pass filter along one dim.
    /// let x = Tensor::rand([3, 16], (Kind::Double, Device::Cpu));
    /// let low = x.rfftn_modes(&[1], &[vec![0..1]], FftNorm::Backward)?;
    /// let y = low.irfftn_modes(&[16], &[1], &[vec![0..1]], FftNorm::Backward)?;
    /// let mean = x.mean_dim(1, true, Kind::Double);
    /// assert!(y.allclose(&mean.expand_as(&x), 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn irfftn_modes(&self, s: &[i64], dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Result<Self>
    where
        Self: Array,
    {
        one("irfftn_modes", &[self], args!("s": s, "dim": dims, "kept": pairs(kept), "norm": norm.name()))
    }

    /// [`irfftn_modes`](Self::irfftn_modes) to the shape of `field`; where ranks have parts, each makes those that it has of
    /// `field`, so that the two can be added where they lie.
    ///
    /// ```
    /// use isobar_array::{FftNorm, Spectral};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // The spectral path of a Fourier layer, added to its input.
    /// let x = Tensor::rand([1, 3, 16], (Kind::Double, Device::Cpu));
    /// let kept = [vec![0..4]];
    /// let low = x.rfftn_modes(&[2], &kept, FftNorm::Backward)?;
    /// let y = low.irfftn_modes_as(&x, &[2], &kept, FftNorm::Backward)?;
    /// assert_eq!((&x + y).size(), [1, 3, 16]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn irfftn_modes_as(
        &self,
        field: &Self,
        dims: &[i64],
        kept: &[Vec<Range<i64>>],
        norm: FftNorm,
    ) -> Result<Self>
    where
        Self: Array,
    {
        let points = points_like("irfftn_modes", &self.shape(), &field.shape(), dims)?;
        self.irfftn_modes(&points, dims, kept, norm)?.redistribute_like(field)
    }
}

/// Returns the extents of a field along the dims of a transform; along all others it must be as the spectrum.
///
/// # Errors
///
/// Shapes that differ along another dim, or a dim that the field lacks.
pub fn points_like(op: &'static str, spectrum: &[i64], field: &[i64], dims: &[i64]) -> Result<Vec<i64>> {
    let mut shape = spectrum.to_vec();
    let mut points = Vec::with_capacity(dims.len());
    for &dim in dims {
        let dim = resolve(op, dim, spectrum.len())?;
        points.push(field.get(dim).copied().unwrap_or_default());
        shape[dim] = points[points.len() - 1];
    }
    match shape == field {
        true => Ok(points),
        false => Err(argument(op, format!("modes {spectrum:?} over dims {dims:?} give no field {field:?}"))),
    }
}

/// Returns each range as its first index and its end.
fn pairs(kept: &[Vec<Range<i64>>]) -> Vec<Vec<[i64; 2]>> {
    let pair = |range: &Range<i64>| [range.start, range.end];
    kept.iter().map(|ranges| ranges.iter().map(pair).collect()).collect()
}

impl Spectral for Tensor {
    fn fftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self> {
        dense("fftn", self, fourier::Kind::Forward, s, dims, norm)
    }

    fn ifftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self> {
        dense("ifftn", self, fourier::Kind::Inverse, s, dims, norm)
    }

    fn rfftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self> {
        dense("rfftn", self, fourier::Kind::Real, s, dims, norm)
    }

    fn irfftn(&self, s: &[i64], dims: &[i64], norm: FftNorm) -> Result<Self> {
        dense("irfftn", self, fourier::Kind::InverseReal, s, dims, norm)
    }

    fn rfft2_modes(&self, dim: i64, modes: &Modes, norm: FftNorm) -> Result<Self> {
        let op = "rfft2_modes";
        let shape = self.size();
        let at = resolve(op, dim, shape.len())?;
        if at + 1 == shape.len() {
            return Err(argument(op, format!("dim {dim} of {shape:?} has no dim after it")));
        }
        let plan = Plan::new(op, self, &shape[..at], [shape[at], shape[at + 1]], &shape[at + 2..], modes)?;
        let x = named(op, &[self], self.f_reshape([plan.outer, plan.height, plan.width, plan.inner]))?;
        let result = match plan.way() {
            FftAlgorithm::Empty => {
                named(op, &[self], empty_transform(&x, &[1, 2], &[2 * plan.rows(), plan.columns()]))?
            }
            FftAlgorithm::Matrices => {
                in_full_precision(Tensor::device(self), || plan.forward_by_matrices(&x, norm))?
            }
            FftAlgorithm::Fft => plan.forward_by_fft(&x, norm)?,
        };
        let shape = [&shape[..at], &[2, plan.rows(), plan.columns()], &shape[at + 2..]].concat();
        named(op, &[self], result.f_reshape(shape))
    }

    fn irfft2_modes(&self, dim: i64, size: [i64; 2], modes: &Modes, norm: FftNorm) -> Result<Self> {
        let op = "irfft2_modes";
        let shape = self.size();
        let at = resolve(op, dim, shape.len())?;
        let want = [2, modes.rows.end - modes.rows.start, modes.columns.end - modes.columns.start];
        if shape.get(at..at + 3) != Some(&want[..]) {
            return Err(argument(
                op,
                format!("{shape:?} does not hold {want:?} (parts, rows, columns) at dim {dim}"),
            ));
        }
        let plan = Plan::new(op, self, &shape[..at], size, &shape[at + 3..], modes)?;
        let field = match plan.way() {
            FftAlgorithm::Empty => {
                let shape = [plan.outer, 2 * plan.rows(), plan.columns(), plan.inner];
                let modes = named(op, &[self], self.f_reshape(shape))?;
                named(op, &[self], empty_transform(&modes, &[1, 2], &size))?
            }
            FftAlgorithm::Matrices => {
                in_full_precision(Tensor::device(self), || plan.inverse_by_matrices(self, norm))?
            }
            FftAlgorithm::Fft => plan.inverse_by_fft(self, norm)?,
        };
        named(op, &[self], field.f_reshape([&shape[..at], &size, &shape[at + 3..]].concat()))
    }

    fn rfftn_modes(&self, dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Result<Self> {
        in_full_precision(Tensor::device(self), || modes::forward(self, dims, kept, norm))
    }

    fn irfftn_modes(&self, s: &[i64], dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Result<Self> {
        in_full_precision(Tensor::device(self), || modes::inverse(self, s, dims, kept, norm))
    }
}

fn dense(
    op: &'static str,
    x: &Tensor,
    kind: fourier::Kind,
    s: &[i64],
    dims: &[i64],
    norm: FftNorm,
) -> Result<Tensor> {
    let transform = Transform::new(op, kind, Array::kind(x), &x.size(), s, dims)?;
    transform.local(op, x, &transform.dims, norm)
}

/// Extents of one transform of `[outer, height, width, inner]`.
struct Plan<'a> {
    outer: i64,
    height: i64,
    width: i64,
    inner: i64,
    modes: &'a Modes,
    kind: Kind,
    device: Device,
}

impl<'a> Plan<'a> {
    fn new(
        op: &'static str,
        array: &Tensor,
        outer: &[i64],
        [height, width]: [i64; 2],
        inner: &[i64],
        modes: &'a Modes,
    ) -> Result<Self> {
        let kind = Array::kind(array);
        if !matches!(kind, Kind::Float | Kind::Double) {
            return Err(argument(op, format!("dtype {kind:?}; convert to Float or Double first")));
        }
        let inside = |range: &Range<i64>, count: i64| {
            0 <= range.start && range.start <= range.end && range.end <= count
        };
        if height < 1 || width < 1 || !inside(&modes.rows, height) || !inside(&modes.columns, width / 2 + 1) {
            let reason = format!("{modes:?} is not inside the half spectrum {height} x {}", width / 2 + 1);
            return Err(argument(op, reason));
        }
        let device = Array::device(array);
        Ok(Self {
            outer: outer.iter().product(),
            height,
            width,
            inner: inner.iter().product(),
            modes,
            kind,
            device,
        })
    }

    fn rows(&self) -> i64 {
        self.modes.rows.end - self.modes.rows.start
    }

    fn columns(&self) -> i64 {
        self.modes.columns.end - self.modes.columns.start
    }

    fn ranges(&self) -> [&[Range<i64>]; 2] {
        [&self.modes.rows, &self.modes.columns].map(std::slice::from_ref)
    }

    fn way(&self) -> FftAlgorithm {
        if self.outer * self.inner == 0 {
            return FftAlgorithm::Empty;
        }
        // Dense DFT is faster for short dims: it costs `width + 2 height` multiplications per value at the speed of a
        // matrix product, computes only the retained modes, and moves no data.
        let short = self.device == Device::Cpu && self.width + 2 * self.height <= 512;
        if short { FftAlgorithm::Matrices } else { FftAlgorithm::Fft }
    }

    /// `[outer, height, width, inner]` to `[outer, 2 rows, columns · inner]`.
    fn forward_by_matrices(&self, x: &Tensor, norm: FftNorm) -> Result<Tensor> {
        let [rows, columns] = self.ranges();
        let along_width =
            tables::real_forward(self.width, columns, norm.scale(self.width, false), self.kind)?;
        let along_height =
            tables::complex_forward(self.height, rows, norm.scale(self.height, false), self.kind)?;
        let lines = self.outer * self.height;
        let product = || {
            let half = left_product(&along_width, &x.f_reshape([lines, self.width, self.inner])?)?;
            let columns = half.f_reshape([self.outer, 2 * self.height, self.columns() * self.inner])?;
            left_product(&along_height, &columns)
        };
        named("rfft2_modes", &[x], product())
    }

    /// `[outer, 2 rows, columns, inner]` to `[outer, height, width, inner]`, these merged in some way.
    fn inverse_by_matrices(&self, x: &Tensor, norm: FftNorm) -> Result<Tensor> {
        let [rows, columns] = self.ranges();
        let along_height =
            tables::complex_forward(self.height, rows, norm.scale(self.height, true), self.kind)?;
        let along_width = tables::real_inverse(self.width, columns, norm.scale(self.width, true), self.kind)?;
        let lines = self.outer * self.height;
        let product = || {
            let columns = x.f_reshape([self.outer, 2 * self.rows(), self.columns() * self.inner])?;
            let half = left_product(&along_height.f_transpose(0, 1)?, &columns)?;
            left_product(&along_width, &half.f_reshape([lines, 2 * self.columns(), self.inner])?)
        };
        named("irfft2_modes", &[x], product())
    }

    fn forward_by_fft(&self, x: &Tensor, norm: FftNorm) -> Result<Tensor> {
        let Modes { rows, columns } = self.modes;
        let transform = || {
            let spectrum = x.f_fft_rfft2(None::<&[i64]>, [1, 2], norm.name())?;
            let modes =
                spectrum.f_narrow(1, rows.start, self.rows())?.f_narrow(2, columns.start, self.columns())?;
            modes.f_view_as_real()?.f_permute([0, 4, 1, 2, 3])
        };
        named("rfft2_modes", &[x], transform())
    }

    fn inverse_by_fft(&self, x: &Tensor, norm: FftNorm) -> Result<Tensor> {
        let Modes { rows, columns } = self.modes;
        // From the last dim backwards: parts, inner, columns, rows.
        let after = (self.width / 2 + 1 - columns.end, self.height - rows.end);
        let around = [0, 0, 0, 0, columns.start, after.0, rows.start, after.1];
        let transform = || {
            let parts = x.f_reshape([self.outer, 2, self.rows(), self.columns(), self.inner])?;
            let whole = parts.f_permute([0, 2, 3, 4, 1])?.f_pad(around, "constant", 0.0)?;
            let spectrum = as_complex(&whole)?;
            spectrum.f_fft_irfft2(&[self.height, self.width][..], [1, 2], norm.name())
        };
        named("irfft2_modes", &[x], transform())
    }
}
