//! Transforms over any dims, of which few modes are wanted.

use std::ops::Range;

use tch::{Device, Kind, TchError, Tensor};

use super::transforms::{FftAlgorithm, FftNorm, complex, empty_transform, left_product};
use super::{Array, argument, named, resolve, tables};
use crate::error::Result;

/// The modes `kept` of the half spectrum of `x` over `dims`.
pub(super) fn forward(x: &Tensor, dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Result<Tensor> {
    let op = "rfftn_modes";
    let dims = distinct(op, dims, x.dim())?;
    let shape = x.size();
    let extents: Vec<i64> = dims.iter().map(|&dim| shape[dim]).collect();
    let plan = Plan::new(op, &extents, kept, Array::kind(x))?;
    let order = Order::new(&dims, shape.len());
    let y = named(op, &[x], order.gather(x))?;
    let numbers = x.numel() as i64;
    let y = match plan.way(numbers, numbers, Array::device(x)) {
        FftAlgorithm::Empty => named(op, &[x], plan.forward_of_empty(&y, order.first))?,
        FftAlgorithm::Matrices => plan.forward_by_matrices(op, &y, order.first, norm)?,
        FftAlgorithm::Fft => named(op, &[x], plan.forward_by_fft(y, order.first, norm))?,
    };
    named(op, &[x], order.put_back(&y))
}

/// Back from the modes `kept` to the extents `s`.
pub(super) fn inverse(
    x: &Tensor,
    s: &[i64],
    dims: &[i64],
    kept: &[Vec<Range<i64>>],
    norm: FftNorm,
) -> Result<Tensor> {
    let op = "irfftn_modes";
    let dims = distinct(op, dims, x.dim())?;
    if s.len() != dims.len() {
        return Err(argument(op, format!("{} extents for {} dims", s.len(), dims.len())));
    }
    let kind = match Array::kind(x) {
        Kind::ComplexFloat => Kind::Float,
        Kind::ComplexDouble => Kind::Double,
        other => return Err(argument(op, format!("dtype {other:?} is not complex"))),
    };
    let plan = Plan::new(op, s, kept, kind)?;
    let shape = x.size();
    if let Some((&dim, count)) = dims.iter().zip(&plan.counts).find(|&(&dim, &count)| shape[dim] != count) {
        return Err(argument(op, format!("{shape:?} has not the {count} modes kept along dim {dim}")));
    }
    let order = Order::new(&dims, shape.len());
    let y = named(op, &[x], order.gather(x))?;
    let outside: i64 = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]).product();
    let y = match plan.way(outside * s.iter().product::<i64>(), x.numel() as i64, Array::device(x)) {
        FftAlgorithm::Empty => named(op, &[x], plan.inverse_of_empty(&y, order.first))?,
        FftAlgorithm::Matrices => plan.inverse_by_matrices(op, &y, order.first, norm)?,
        FftAlgorithm::Fft => named(op, &[x], plan.inverse_by_fft(y, order.first, norm))?,
    };
    named(op, &[x], order.put_back(&y))
}

fn distinct(op: &'static str, dims: &[i64], count: usize) -> Result<Vec<usize>> {
    let found: Vec<usize> = dims.iter().map(|&dim| resolve(op, dim, count)).collect::<Result<_>>()?;
    let twice = found.iter().enumerate().any(|(index, dim)| found[..index].contains(dim));
    if found.is_empty() || twice {
        return Err(argument(op, format!("{dims:?} are not one or more dims, each once")));
    }
    Ok(found)
}

/// Permutation that makes the transformed dims adjacent.
struct Order {
    /// The first of them then.
    first: usize,
    /// The permutation there, and back; none where they stand so.
    moves: Option<[Vec<i64>; 2]>,
}

impl Order {
    fn new(dims: &[usize], count: usize) -> Self {
        if dims.windows(2).all(|pair| pair[0] + 1 == pair[1]) {
            return Self { first: dims[0], moves: None };
        }
        let others = (0..count).filter(|dim| !dims.contains(dim));
        let there: Vec<i64> = dims.iter().copied().chain(others).map(|dim| dim as i64).collect();
        let mut back = vec![0; count];
        there.iter().enumerate().for_each(|(at, &dim)| back[dim as usize] = at as i64);
        Self { first: 0, moves: Some([there, back]) }
    }

    fn gather(&self, x: &Tensor) -> Result<Tensor, TchError> {
        match &self.moves {
            Some([there, _]) => x.f_permute(there),
            None => Ok(x.shallow_clone()),
        }
    }

    fn put_back(&self, x: &Tensor) -> Result<Tensor, TchError> {
        match &self.moves {
            Some([_, back]) => x.f_permute(back),
            None => Ok(x.shallow_clone()),
        }
    }
}

/// A transform over consecutive dims, the last of which is halved.
struct Plan<'a> {
    extents: &'a [i64],
    kept: &'a [Vec<Range<i64>>],
    /// Number of retained modes along each dim.
    counts: Vec<i64>,
    /// Dtype of the real values.
    kind: Kind,
}

impl<'a> Plan<'a> {
    fn new(op: &'static str, extents: &'a [i64], kept: &'a [Vec<Range<i64>>], kind: Kind) -> Result<Self> {
        if !matches!(kind, Kind::Float | Kind::Double) {
            return Err(argument(op, format!("dtype {kind:?}; convert to Float or Double first")));
        }
        if kept.len() != extents.len() {
            return Err(argument(op, format!("modes of {} dims for {} dims", kept.len(), extents.len())));
        }
        for (index, (&extent, ranges)) in extents.iter().zip(kept).enumerate() {
            let modes = if index + 1 == extents.len() { extent / 2 + 1 } else { extent };
            let inside =
                |range: &Range<i64>| 0 <= range.start && range.start <= range.end && range.end <= modes;
            if extent < 1 || !ranges.iter().all(inside) {
                return Err(argument(op, format!("{ranges:?} is not inside the {modes} modes of {extent}")));
            }
        }
        Ok(Self { extents, kept, counts: kept.iter().map(|ranges| tables::count(ranges)).collect(), kind })
    }

    /// Chooses FFT or dense DFT for `numbers` real points, with `given` values on the input side.
    fn way(&self, numbers: i64, given: i64, device: Device) -> FftAlgorithm {
        if numbers == 0 || given == 0 || self.counts.contains(&0) {
            return FftAlgorithm::Empty;
        }
        // Multiplications: a number, for the dims from the last to the first, each of which leaves fewer; and what the
        // matrices' entries cost to make. The FFT costs as much as about 512 for each number, see `rfft2_modes`.
        let (mut left, mut products, mut entries) = (1.0, 0.0, 0);
        for (index, (&extent, &count)) in self.extents.iter().zip(&self.counts).enumerate().rev() {
            let halved = index + 1 == self.extents.len();
            products += left * 2.0 * count as f64;
            left *= if halved { 2.0 } else { 1.0 } * count as f64 / extent as f64;
            entries += if halved { 2 } else { 4 } * count * extent;
        }
        let few = numbers as f64 * products + 16.0 * entries as f64 <= 512.0 * numbers as f64;
        if device == Device::Cpu && few { FftAlgorithm::Matrices } else { FftAlgorithm::Fft }
    }

    fn last(&self) -> usize {
        self.extents.len() - 1
    }

    fn at(&self, first: usize) -> Vec<i64> {
        (first..first + self.extents.len()).map(|dim| dim as i64).collect()
    }

    fn forward_of_empty(&self, x: &Tensor, first: usize) -> Result<Tensor, TchError> {
        empty_transform(x, &self.at(first), &self.counts)?.f_to_kind(complex(self.kind))
    }

    fn inverse_of_empty(&self, x: &Tensor, first: usize) -> Result<Tensor, TchError> {
        empty_transform(x, &self.at(first), self.extents)?.f_real()?.f_contiguous()
    }

    /// From the last dim to the first; before each done one stand its real and imaginary parts, which the dim before it takes
    /// into its own product.
    fn forward_by_matrices(
        &self,
        op: &'static str,
        x: &Tensor,
        first: usize,
        norm: FftNorm,
    ) -> Result<Tensor> {
        let shape = x.size();
        let (before, after) = (&shape[..first], &shape[first + self.extents.len()..]);
        let outer: i64 = before.iter().product();
        let mut inner: i64 = after.iter().product();
        let mut y = x.shallow_clone();
        for (index, (&extent, ranges)) in self.extents.iter().zip(self.kept).enumerate().rev() {
            let lines = outer * self.extents[..index].iter().product::<i64>();
            let halved = index == self.last();
            let scale = norm.scale(extent, false);
            let matrix = match halved {
                true => tables::real_forward(extent, ranges, scale, self.kind)?,
                false => tables::complex_forward(extent, ranges, scale, self.kind)?,
            };
            let parts = if halved { extent } else { 2 * extent };
            y = named(op, &[x], y.f_reshape([lines, parts, inner]).and_then(|y| left_product(&matrix, &y)))?;
            inner *= self.counts[index];
        }
        let shape = [before, &self.counts, after].concat();
        let paired = || {
            let parts = y.f_reshape([outer, 2, inner])?;
            Tensor::f_complex(&parts.f_select(1, 0)?, &parts.f_select(1, 1)?)?.f_reshape(shape)
        };
        named(op, &[x], paired())
    }

    /// Inverts by matrices, from the first dim to the last.
    fn inverse_by_matrices(
        &self,
        op: &'static str,
        x: &Tensor,
        first: usize,
        norm: FftNorm,
    ) -> Result<Tensor> {
        let shape = x.size();
        let (before, after) = (&shape[..first], &shape[first + self.extents.len()..]);
        let mut lines: i64 = before.iter().product();
        let mut inner = self.counts.iter().chain(after).product::<i64>();
        let parts = || {
            let pairs = x.f_reshape([lines, inner])?.f_view_as_real()?;
            pairs.f_permute([0, 2, 1])
        };
        let mut y = named(op, &[x], parts())?;
        for (index, (&extent, ranges)) in self.extents.iter().zip(self.kept).enumerate() {
            inner /= self.counts[index];
            let scale = norm.scale(extent, true);
            let matrix = match index == self.last() {
                true => tables::real_inverse(extent, ranges, scale, self.kind)?,
                false => {
                    let forward = tables::complex_forward(extent, ranges, scale, self.kind)?;
                    named(op, &[x], forward.f_transpose(0, 1))?
                }
            };
            y = named(
                op,
                &[x],
                y.f_reshape([lines, 2 * self.counts[index], inner]).and_then(|y| left_product(&matrix, &y)),
            )?;
            lines *= extent;
        }
        named(op, &[x], y.f_reshape([before, self.extents, after].concat()))
    }

    /// Dim by dim, from the last, so that the others have fewer lines to transform.
    fn forward_by_fft(&self, x: Tensor, first: usize, norm: FftNorm) -> Result<Tensor, TchError> {
        let mut y = x;
        for (index, ranges) in self.kept.iter().enumerate().rev() {
            let dim = (first + index) as i64;
            y = match index == self.last() {
                true => y.f_fft_rfft(None, dim, norm.name())?,
                false => y.f_fft_fft(None, dim, norm.name())?,
            };
            y = chosen(&y, dim, ranges)?;
        }
        Ok(y)
    }

    fn inverse_by_fft(&self, x: Tensor, first: usize, norm: FftNorm) -> Result<Tensor, TchError> {
        let mut y = x;
        for (index, (&extent, ranges)) in self.extents.iter().zip(self.kept).enumerate() {
            let dim = (first + index) as i64;
            y = match index == self.last() {
                true => placed(&y, dim, ranges, extent / 2 + 1)?.f_fft_irfft(extent, dim, norm.name())?,
                false => placed(&y, dim, ranges, extent)?.f_fft_ifft(None, dim, norm.name())?,
            };
        }
        Ok(y)
    }
}

/// The modes of the ranges along `dim`.
fn chosen(x: &Tensor, dim: i64, ranges: &[Range<i64>]) -> Result<Tensor, TchError> {
    match ranges {
        [one] => x.f_narrow(dim, one.start, one.end - one.start),
        _ => x.f_index_select(dim, &index_of(ranges, x)?),
    }
}

/// The modes back in their places among `count`, those with the same place added.
fn placed(x: &Tensor, dim: i64, ranges: &[Range<i64>], count: i64) -> Result<Tensor, TchError> {
    let mut shape = x.size();
    shape[dim as usize] = count;
    if let [one] = ranges {
        let after = shape.len() - 1 - dim as usize;
        let mut pairs = vec![0; 2 * after];
        pairs.extend([one.start, count - one.end]);
        return match pairs[2 * after..] == [0, 0] {
            true => Ok(x.shallow_clone()),
            false => x.f_constant_pad_nd(pairs),
        };
    }
    let zeros = Tensor::f_zeros(shape, (Tensor::kind(x), Tensor::device(x)))?;
    zeros.f_index_add(dim, &index_of(ranges, x)?, x)
}

fn index_of(ranges: &[Range<i64>], x: &Tensor) -> Result<Tensor, TchError> {
    let modes: Vec<i64> = tables::indices(ranges).collect();
    Tensor::f_from_slice(&modes)?.f_to_device(Tensor::device(x))
}

#[cfg(test)]
mod tests;
