//! Fourier transforms of dense tensors.

use std::ops::Range;

use tch::{Kind as Element, TchError, Tensor};

use super::transforms::left_product;
use super::{FftNorm, Spectral, argument, named, resolve, tables};
use crate::error::Result;

/// Kind of transform.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// From complex values to their spectrum (`fft`).
    Forward,
    /// From a spectrum to complex values (`ifft`).
    Inverse,
    /// From real values to the half of their spectrum that determines the other (`rfft`).
    Real,
    /// From half a spectrum to real values (`irfft`).
    InverseReal,
}

/// A transform of global extents.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Transform {
    /// Its direction, and whether one side is real.
    pub kind: Kind,
    /// The last of them is the one that a real transform halves.
    pub dims: Vec<usize>,
    /// Number of points along each.
    pub points: Vec<i64>,
    /// Of a real transform and its inverse, the modes that there are along each dim, where not all.
    pub kept: Option<Vec<Vec<Range<i64>>>>,
}

impl Transform {
    /// Makes the transform of a tensor of that shape; points of −1, or none at all, are the extents.
    ///
    /// # Errors
    ///
    /// A dtype, dims or numbers of points that the transform does not take.
    pub fn new(
        op: &'static str,
        kind: Kind,
        element: Element,
        shape: &[i64],
        s: &[i64],
        dims: &[i64],
    ) -> Result<Self> {
        check_kind(op, kind, element)?;
        let dims: Vec<usize> = match dims {
            [] if s.is_empty() => (0..shape.len()).collect(),
            [] if s.len() <= shape.len() => (shape.len() - s.len()..shape.len()).collect(),
            dims => dims.iter().map(|&dim| resolve(op, dim, shape.len())).collect::<Result<_>>()?,
        };
        let mut sorted = dims.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != dims.len() || dims.is_empty() {
            return Err(argument(
                op,
                format!("dims {dims:?} of {shape:?}; expected different ones, at least one"),
            ));
        }
        if !s.is_empty() && s.len() != dims.len() {
            return Err(argument(
                op,
                format!("{} points for {} dims; expected one for each", s.len(), dims.len()),
            ));
        }
        let own = |(index, &dim): (usize, &usize)| match s.get(index) {
            Some(&points) if points != -1 => points,
            _ if kind == Kind::InverseReal && index + 1 == dims.len() => 2 * (shape[dim] - 1),
            _ => shape[dim],
        };
        let points: Vec<i64> = dims.iter().enumerate().map(own).collect();
        if let Some(none) = points.iter().find(|&&points| points < 1) {
            return Err(argument(
                op,
                format!("{none} points of {shape:?}; expected at least 1 along each dim"),
            ));
        }
        Ok(Self { kind, dims, points, kept: None })
    }

    /// Restricts the transform to these modes; of an inverse, `shape` is theirs.
    ///
    /// # Errors
    ///
    /// Not one list of modes for each dim, or modes outside of the spectrum.
    pub fn keeping(self, op: &'static str, kept: &[Vec<Range<i64>>], shape: &[i64]) -> Result<Self> {
        if kept.len() != self.dims.len() {
            let (modes, dims) = (kept.len(), self.dims.len());
            return Err(argument(
                op,
                format!("modes of {modes} dims for {dims}; expected them for each dim"),
            ));
        }
        for ((&dim, &points), ranges) in self.dims.iter().zip(&self.points).zip(kept) {
            let modes = if self.last() == Some(dim) { points / 2 + 1 } else { points };
            let inside = |r: &Range<i64>| 0 <= r.start && r.start <= r.end && r.end <= modes;
            if !ranges.iter().all(inside) {
                return Err(argument(op, format!("{ranges:?} is not inside the {modes} modes of dim {dim}")));
            }
            if self.kind == Kind::InverseReal && count(ranges) != shape[dim] {
                let given = shape[dim];
                return Err(argument(op, format!("{ranges:?} are not the {given} modes along dim {dim}")));
            }
        }
        Ok(Self { kept: Some(kept.to_vec()), ..self })
    }

    /// The modes that there are along the dim, where not all.
    fn kept_of(&self, dim: usize) -> Option<&Vec<Range<i64>>> {
        self.kept.as_ref()?.get(self.dims.iter().position(|&other| other == dim)?)
    }

    /// The dim that is halved.
    pub fn last(&self) -> Option<usize> {
        self.dims.last().copied().filter(|_| self.kind != Kind::Forward && self.kind != Kind::Inverse)
    }

    fn points_of(&self, dim: usize) -> i64 {
        self.dims.iter().position(|&other| other == dim).map_or(0, |index| self.points[index])
    }

    /// Returns the number of elements that the transform reads along the dim.
    pub fn read_extent(&self, dim: usize) -> i64 {
        let points = self.points_of(dim);
        match self.kept_of(dim) {
            Some(ranges) if self.kind == Kind::InverseReal => count(ranges),
            _ if self.kind == Kind::InverseReal && self.last() == Some(dim) => points / 2 + 1,
            _ => points,
        }
    }

    /// The result's extent along the dim.
    pub fn result_extent(&self, dim: usize) -> i64 {
        let points = self.points_of(dim);
        match self.kept_of(dim) {
            Some(ranges) if self.kind == Kind::Real => count(ranges),
            _ if self.kind == Kind::Real && self.last() == Some(dim) => points / 2 + 1,
            _ => points,
        }
    }

    /// Returns whether so few modes are retained along the dim that a product with their matrix is cheaper than a transform.
    pub fn has_few_modes(&self, dim: usize) -> bool {
        self.kept_of(dim).is_some_and(|ranges| count(ranges) <= FEW_MODES)
    }

    /// Computes the contribution of the points `own` along the dim to the modes along it. The first dim of a real transform is
    /// the one that it halves.
    ///
    /// # Errors
    ///
    /// libtorch refuses the product.
    pub fn contribution(
        &self,
        op: &'static str,
        x: &Tensor,
        (dim, own): (usize, &[i64]),
        norm: FftNorm,
    ) -> Result<Tensor> {
        let matrix = self.waves(op, x, (dim, own), norm.scale(self.points_of(dim), false))?;
        let sums = || {
            let (mut shape, modes) = (x.size(), matrix.size()[0] / 2);
            shape[dim] = modes;
            let products = left_product(&matrix, &lines(x, dim)?)?;
            let (cos, sin) = (products.f_narrow(1, 0, modes)?, products.f_narrow(1, modes, modes)?);
            let (re, im) = match x.is_complex() {
                true => {
                    let part = |pairs: &Tensor, at| pairs.f_unflatten(-1, [-1, 2])?.f_select(-1, at);
                    // (cos + i sin)(re + i im)
                    let re = part(&cos, 0)?.f_sub(&part(&sin, 1)?)?;
                    (re, part(&cos, 1)?.f_add(&part(&sin, 0)?)?)
                }
                false => (cos.f_contiguous()?, sin.f_contiguous()?),
            };
            Tensor::f_complex(&re, &im)?.f_reshape(shape)
        };
        named(op, &[x], sums())
    }

    /// Evaluates the points `own` along the dim from all modes along it. The dim is not the halved one.
    ///
    /// # Errors
    ///
    /// libtorch refuses the product.
    pub fn points_at(
        &self,
        op: &'static str,
        x: &Tensor,
        (dim, own): (usize, &[i64]),
        norm: FftNorm,
    ) -> Result<Tensor> {
        let matrix = self.waves(op, x, (dim, own), norm.scale(self.points_of(dim), true))?;
        let values = || {
            let mut shape = x.size();
            shape[dim] = own.len() as i64;
            // The matrix is conjugate to the one back: it takes cos · z and −sin · (−i z).
            let rotated = Tensor::f_complex(&x.f_imag()?, &x.f_real()?.f_neg()?)?;
            let both = lines(&Tensor::f_cat(&[x, &rotated], dim as i64)?, dim)?;
            let pairs = left_product(&matrix.f_transpose(0, 1)?, &both)?;
            shape.push(2);
            pairs.f_reshape(shape)?.f_view_as_complex()
        };
        named(op, &[x], values())
    }

    /// Of the modes there are along the dim, cosines, then sines with their sign forward, at the points `own`:
    /// `[2 modes, own]`.
    fn waves(&self, op: &'static str, x: &Tensor, (dim, own): (usize, &[i64]), scale: f64) -> Result<Tensor> {
        let modes = self.kept_of(dim).map_or(&[][..], Vec::as_slice);
        let matrix = tables::real_forward(self.points_of(dim), modes, scale, real_kind(x.kind()))?;
        let columns = || matrix.f_index_select(1, &Tensor::f_from_slice(own)?)?.f_to_device(x.device());
        named(op, &[x], columns())
    }

    /// Transforms these dims, of which the tensor has all indices.
    ///
    /// # Errors
    ///
    /// libtorch refuses the transform.
    pub fn local(&self, op: &'static str, x: &Tensor, dims: &[usize], norm: FftNorm) -> Result<Tensor> {
        let halves = self.last().is_some_and(|last| dims.contains(&last));
        if self.kept.is_some() {
            return self.local_modes(op, x, dims, norm, halves);
        }
        let kind = match self.kind {
            Kind::Real if !halves => Kind::Forward,
            Kind::InverseReal if !halves => Kind::Inverse,
            kind => kind,
        };
        let points: Vec<i64> = dims.iter().map(|&dim| self.points_of(dim)).collect();
        let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
        named(op, &[x], transform(x, kind, &points, &dims, norm))
    }

    /// Computes the contribution of the retained modes.
    fn local_modes(
        &self,
        op: &'static str,
        x: &Tensor,
        dims: &[usize],
        norm: FftNorm,
        halves: bool,
    ) -> Result<Tensor> {
        let points: Vec<i64> = dims.iter().map(|&dim| self.points_of(dim)).collect();
        let kept: Vec<Vec<Range<i64>>> =
            dims.iter().map(|&dim| self.kept_of(dim).cloned().unwrap_or_default()).collect();
        let over: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
        match (self.kind, halves) {
            (Kind::InverseReal, true) => x.irfftn_modes(&points, &over, &kept, norm),
            (_, true) => x.rfftn_modes(&over, &kept, norm),
            (Kind::InverseReal, false) => {
                let mut whole = x.shallow_clone();
                for ((&dim, &points), ranges) in over.iter().zip(&points).zip(&kept) {
                    whole = named(op, &[x], spread(&whole, dim, points, ranges))?;
                }
                named(op, &[x], transform(&whole, Kind::Inverse, &points, &over, norm))
            }
            (_, false) => {
                let all = named(op, &[x], transform(x, Kind::Forward, &points, &over, norm))?;
                let pick = |all: Tensor, (&dim, ranges): (&i64, &Vec<Range<i64>>)| {
                    all.f_index_select(dim, &places(ranges, x)?)
                };
                named(op, &[x], over.iter().zip(&kept).try_fold(all, pick))
            }
        }
    }
}

/// A point's product with the matrix of more modes costs more than its part of a fast transform.
const FEW_MODES: i64 = 128;

/// `x` as `[before, dim, after]`, complex numbers as consecutive pairs.
fn lines(x: &Tensor, dim: usize) -> Result<Tensor, TchError> {
    let shape = x.size();
    let extents = [shape[..dim].iter().product(), shape[dim], shape[dim + 1..].iter().product()];
    let x = x.f_reshape(extents)?;
    if x.is_complex() { x.f_resolve_conj()?.f_view_as_real()?.f_flatten(-2, -1) } else { Ok(x) }
}

fn real_kind(kind: Element) -> Element {
    match kind {
        Element::ComplexFloat => Element::Float,
        Element::ComplexDouble => Element::Double,
        real => real,
    }
}

/// Returns the number of indices in the ranges.
fn count(ranges: &[Range<i64>]) -> i64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// The indices of the ranges one after another.
fn places(ranges: &[Range<i64>], like: &Tensor) -> Result<Tensor, TchError> {
    let indices: Vec<i64> = ranges.iter().cloned().flatten().collect();
    Tensor::f_from_slice(&indices)?.f_to_device(like.device())
}

/// Modes at their places among zeros; several of one place are added.
fn spread(x: &Tensor, dim: i64, points: i64, ranges: &[Range<i64>]) -> Result<Tensor, TchError> {
    let mut shape = x.size();
    shape[dim as usize] = points;
    let zeros = Tensor::f_zeros(shape, (x.kind(), x.device()))?;
    zeros.f_index_add(dim, &places(ranges, x)?, x)
}

/// Refuses dtypes of elements that there is no transform of.
fn check_kind(op: &'static str, kind: Kind, element: Element) -> Result<()> {
    let complex = matches!(element, Element::ComplexFloat | Element::ComplexDouble);
    let real = matches!(element, Element::Float | Element::Double);
    match (kind, complex, real) {
        (Kind::Real, true, _) => Err(argument(op, format!("{element:?} is not real; use fft"))),
        (_, false, false) => {
            Err(argument(op, format!("dtype {element:?}; convert to Float or Double first")))
        }
        _ => Ok(()),
    }
}

/// The transform over `dims` of so many points.
fn transform(
    x: &Tensor,
    kind: Kind,
    points: &[i64],
    dims: &[i64],
    norm: FftNorm,
) -> Result<Tensor, TchError> {
    if x.numel() == 0 {
        return empty_transform(x, kind, points, dims);
    }
    match kind {
        Kind::Forward => x.f_fft_fftn(points, dims, norm.name()),
        Kind::Inverse => x.f_fft_ifftn(points, dims, norm.name()),
        Kind::Real => x.f_fft_rfftn(points, dims, norm.name()),
        Kind::InverseReal => x.f_fft_irfftn(points, dims, norm.name()),
    }
}

/// The transform of a tensor that has no elements, which libtorch refuses: attached to the graph, so that ranks without
/// elements make the same nodes as the others.
fn empty_transform(x: &Tensor, kind: Kind, points: &[i64], dims: &[i64]) -> Result<Tensor, TchError> {
    let zeros = x.f_sum_dim_intlist(dims, true, x.kind())?;
    let mut shape = zeros.size();
    for (index, (&dim, &points)) in dims.iter().zip(points).enumerate() {
        let halved = kind == Kind::Real && index + 1 == dims.len();
        shape[dim.rem_euclid(x.dim() as i64) as usize] = if halved { points / 2 + 1 } else { points };
    }
    let zeros = zeros.f_expand(shape, false)?;
    let double = matches!(x.kind(), Element::Double | Element::ComplexDouble);
    match (kind, x.is_complex()) {
        (Kind::InverseReal, true) => zeros.f_real(),
        (Kind::InverseReal, false) | (_, true) => Ok(zeros),
        (_, false) => zeros.f_to_kind(if double { Element::ComplexDouble } else { Element::ComplexFloat }),
    }
}
