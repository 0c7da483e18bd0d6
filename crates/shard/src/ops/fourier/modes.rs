//! Truncated Fourier transforms: only some modes are kept.

use std::ops::Range;

use super::super::{operator, refuse};
use crate::dense::resolve;
use crate::error::Result;
use crate::layout::{Dim, Layout};
use crate::tensor::ShardTensor;
use isobar_array::kernel::{Kind, Transform, points_like};
use isobar_array::{FftNorm, Modes, Spectral};

impl ShardTensor {
    pub(crate) fn rfft2_modes(&self, dim: i64, modes: &Modes, norm: FftNorm) -> Result<Self> {
        let at = resolve("rfft2_modes", dim, self.ndim())?;
        let _ = resolve("rfft2_modes", at as i64 + 1, self.ndim())?;
        let x = self.reshard_off(&[at, at + 1])?;
        let y = x.local().rfft2_modes(at as i64, modes, norm)?;
        let new =
            [2, modes.rows.end - modes.rows.start, modes.columns.end - modes.columns.start].map(Dim::whole);
        let mut parts = x.layout().dims().to_vec();
        parts.splice(at..at + 2, new);
        Ok(Self::new(y, x.layout().with_dims(parts)))
    }

    pub(crate) fn irfft2_modes(
        &self,
        dim: i64,
        size: [i64; 2],
        modes: &Modes,
        norm: FftNorm,
    ) -> Result<Self> {
        let at = resolve("irfft2_modes", dim, self.ndim())?;
        let _ = resolve("irfft2_modes", at as i64 + 2, self.ndim())?;
        let x = self.reshard_off(&[at, at + 1, at + 2])?;
        let y = x.local().irfft2_modes(at as i64, size, modes, norm)?;
        let mut parts = x.layout().dims().to_vec();
        parts.splice(at..at + 3, size.map(Dim::whole));
        Ok(Self::new(y, x.layout().with_dims(parts)))
    }

    pub(crate) fn rfftn_modes(&self, dims: &[i64], kept: &[Vec<Range<i64>>], norm: FftNorm) -> Result<Self> {
        self.fourier_modes("rfftn_modes", Kind::Real, None, &[], (dims, kept), norm)
    }

    pub(crate) fn irfftn_modes(
        &self,
        s: &[i64],
        dims: &[i64],
        kept: &[Vec<Range<i64>>],
        norm: FftNorm,
    ) -> Result<Self> {
        self.fourier_modes("irfftn_modes", Kind::InverseReal, None, s, (dims, kept), norm)
    }

    pub(crate) fn irfftn_modes_as(
        &self,
        field: &Self,
        dims: &[i64],
        kept: &[Vec<Range<i64>>],
        norm: FftNorm,
    ) -> Result<Self> {
        const OP: &str = "irfftn_modes";
        let s = points_like(OP, self.shape(), field.shape(), dims)?;
        let to = field.layout().without_partial();
        self.fourier_modes(OP, Kind::InverseReal, Some(&to), &s, (dims, kept), norm)?.to_layout(&to)
    }

    /// The real transform, or its inverse to the extents `s`, over dims of which only these modes are kept. What is split anew is
    /// split like `to`.
    pub(super) fn fourier_modes(
        &self,
        op: &'static str,
        kind: Kind,
        to: Option<&Layout>,
        s: &[i64],
        (dims, kept): (&[i64], &[Vec<Range<i64>>]),
        norm: FftNorm,
    ) -> Result<Self> {
        let ranges = || -> Vec<Vec<[i64; 2]>> {
            let pair = |range: &Range<i64>| [range.start, range.end];
            kept.iter().map(|ranges| ranges.iter().map(pair).collect()).collect()
        };
        let args = args!("s": s, "dim": dims, "kept": ranges(), "norm": norm.name());
        operator(op, &[self], args, || {
            let inverse = kind == Kind::InverseReal;
            let complex = matches!(self.kind(), tch::Kind::ComplexFloat | tch::Kind::ComplexDouble);
            if dims.is_empty() || (inverse && (!complex || s.len() != dims.len() || s.contains(&-1))) {
                let given = format!("{:?}, {} extents and {} dims", self.kind(), s.len(), dims.len());
                let reason = format!("{given}; expected complex modes and an extent for each of some dims");
                return refuse(op, reason);
            }
            let transform = Transform::new(op, kind, self.kind(), self.shape(), s, dims)?;
            self.transformed(op, &transform.keeping(op, kept, self.shape())?, to, norm)
        })
    }
}
