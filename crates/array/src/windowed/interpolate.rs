//! Interpolation of dense tensors.

use std::ops::Range;

use tch::{Kind, TchError, Tensor};

use super::adaptive::means;
use super::{along, check_dims, spatial_name};
use crate::error::{Result, named, refuse};
use crate::precision::full;
use crate::registry::Attrs;

/// Interpolation between elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interpolation {
    /// That of ⌊x⌋, libtorch's `nearest`.
    Nearest,
    /// That of the nearest centre, `nearest-exact`.
    NearestExact,
    /// Linear along every dim: `linear`, `bilinear`, `trilinear`.
    Linear,
    /// Cubic along both of two dims (A = −0.75): `bicubic`.
    Cubic,
    /// The mean of the elements that it covers: adaptive pooling.
    Area,
}

impl Interpolation {
    /// Returns PyTorch's name over that number of spatial dims.
    pub fn name(self, spatial: usize) -> &'static str {
        match self {
            Self::Nearest => "nearest",
            Self::NearestExact => "nearest-exact",
            Self::Linear => spatial_name(["linear", "bilinear", "trilinear"], spatial),
            Self::Cubic => "bicubic",
            Self::Area => "area",
        }
    }
}

/// The extents of an interpolation's result.
#[derive(Debug, Clone, PartialEq)]
pub enum Resize {
    /// These, one for each spatial dim or one for all.
    Size(Vec<i64>),
    /// ⌊extent · scale⌋, with one scale for each spatial dim or one for all.
    Scale(Vec<f64>),
}

impl Resize {
    /// Returns the arguments of an interpolation by PyTorch's names.
    pub fn args(&self, mode: &str, align_corners: bool) -> Attrs {
        let (size, scale) = match self {
            Self::Size(size) => (Some(size), None),
            Self::Scale(scale) => (None, Some(scale)),
        };
        args!("size": size, "scale_factor": scale, "mode": mode, "align_corners": align_corners)()
    }
}

/// Elements that each result along one dim is a sum of, and their weights.
#[derive(Debug, Clone)]
pub struct Taps {
    indices: Vec<Vec<i64>>,
    weights: Vec<Vec<f64>>,
}

/// Positions of results among elements along one dim.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Number of elements.
    pub from: i64,
    /// Number of results.
    pub to: i64,
    /// Scale that positions follow, if given.
    pub scale: Option<f64>,
    /// Align the first and the last elements of input and result.
    pub align_corners: bool,
    /// Compute positions in fp32, as libtorch does except for fp64.
    pub single: bool,
    /// Interpolation between elements.
    pub mode: Interpolation,
}

impl Resize {
    /// Returns the result's extents, and the scales that positions follow where they are given.
    ///
    /// # Errors
    ///
    /// Extents below 1; a mode without that number of dims.
    ///
    /// ```
    /// use isobar_array::{Interpolation, Resize};
    ///
    /// let (extents, _) = Resize::Scale(vec![1.5]).resolve(&[1, 3, 8, 5], Interpolation::Linear, false)?;
    /// assert_eq!(extents, [12, 7]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn resolve(
        &self,
        shape: &[i64],
        mode: Interpolation,
        align_corners: bool,
    ) -> Result<(Vec<i64>, Vec<Option<f64>>)> {
        const OP: &str = "interpolate";
        let spatial = shape.len().saturating_sub(2);
        check_dims(OP, shape, spatial)?;
        if mode == Interpolation::Cubic && spatial != 2 {
            return refuse(OP, "bicubic interpolation is of two spatial dims");
        }
        if align_corners && !matches!(mode, Interpolation::Linear | Interpolation::Cubic) {
            return refuse(OP, format!("align_corners has no meaning for {mode:?}"));
        }
        let extents = &shape[2..];
        let output = match self {
            Self::Size(sizes) => super::each(OP, "size", sizes, spatial)?,
            Self::Scale(scales) if scales.len() == 1 || scales.len() == spatial => {
                let scaled =
                    |(index, &extent): (usize, &i64)| (extent as f64 * scales[index % scales.len()]) as i64;
                extents.iter().enumerate().map(scaled).collect()
            }
            Self::Scale(scales) => {
                return refuse(OP, format!("scales {scales:?} for {spatial} spatial dims"));
            }
        };
        if output.iter().chain(extents).any(|&extent| extent < 1) {
            return refuse(OP, format!("from {extents:?} to {output:?}: expected extents of at least 1"));
        }
        let scales = match self {
            Self::Size(_) => vec![None; spatial],
            Self::Scale(scales) => (0..spatial).map(|index| Some(scales[index % scales.len()])).collect(),
        };
        Ok((output, scales))
    }
}

impl Grid {
    /// Distance of two results, in elements.
    fn step(&self) -> f64 {
        let (from, to) = (self.from as f64, self.to as f64);
        let round = |value: f64| if self.single { value as f32 as f64 } else { value };
        match (self.align_corners, self.scale) {
            (true, _) if self.to > 1 => match self.single {
                true => ((self.from - 1) as f32 / (self.to - 1) as f32) as f64,
                false => (from - 1.0) / (to - 1.0),
            },
            (true, _) => 0.0,
            (false, Some(scale)) if scale > 0.0 => round(1.0 / scale),
            (false, _) if self.single => (self.from as f32 / self.to as f32) as f64,
            (false, _) => from / to,
        }
    }

    /// Returns the position of a result, in elements.
    fn position(&self, index: i64) -> f64 {
        let (step, at) = (self.step(), index as f64);
        if self.align_corners {
            return if self.single { (step as f32 * at as f32) as f64 } else { step * at };
        }
        let source = match self.single {
            true => (step as f32).mul_add(at as f32 + 0.5, -0.5) as f64,
            false => step * (at + 0.5) - 0.5,
        };
        if self.mode == Interpolation::Linear { source.max(0.0) } else { source }
    }

    fn of(&self, index: i64) -> (Vec<i64>, Vec<f64>) {
        let last = self.from - 1;
        // libtorch computes these in fp32 whatever the dtype.
        let nearest_step = match self.scale {
            Some(scale) if scale > 0.0 => (1.0 / scale) as f32,
            _ => self.from as f32 / self.to as f32,
        };
        match self.mode {
            Interpolation::Nearest => {
                (vec![((index as f32 * nearest_step).floor() as i64).min(last)], vec![1.0])
            }
            Interpolation::NearestExact => {
                (vec![(((index as f32 + 0.5) * nearest_step).floor() as i64).min(last)], vec![1.0])
            }
            Interpolation::Linear => {
                let at = self.position(index);
                let low = (at.floor() as i64).clamp(0, last);
                let part = (at - low as f64).clamp(0.0, 1.0);
                (vec![low, (low + 1).min(last)], vec![1.0 - part, part])
            }
            _ => {
                let at = self.position(index);
                let low = (at.floor() as i64).min(last);
                let part = (at - low as f64).clamp(0.0, 1.0);
                let taps = (-1..=2).map(|shift| (low + shift).clamp(0, last)).collect();
                (taps, cubic(part).to_vec())
            }
        }
    }

    /// Returns the range of elements that a range of results needs.
    pub fn window(&self, own: Range<i64>) -> (i64, i64) {
        let taps = own.flat_map(|index| self.of(index).0);
        let (first, last) = taps.fold((i64::MAX, -1), |(low, high), tap| (low.min(tap), high.max(tap)));
        if last < 0 { (0, 0) } else { (first, last + 1) }
    }

    /// Returns the elements and weights of a range of results.
    pub fn taps(&self, own: Range<i64>) -> Taps {
        let width = match self.mode {
            Interpolation::Nearest | Interpolation::NearestExact => 1,
            Interpolation::Linear => 2,
            _ => 4,
        };
        let mut taps = Taps { indices: vec![Vec::new(); width], weights: vec![Vec::new(); width] };
        for index in own {
            let (indices, weights) = self.of(index);
            for (tap, (at, weight)) in indices.into_iter().zip(weights).enumerate() {
                taps.indices[tap].push(at);
                taps.weights[tap].push(weight);
            }
        }
        taps
    }
}

impl Taps {
    /// Computes the results along `dim` from a window of the input that begins at element `first`.
    ///
    /// # Errors
    ///
    /// The window lacks an element.
    pub fn apply(&self, x: &Tensor, dim: usize, first: i64) -> Result<Tensor, TchError> {
        let mut sum: Option<Tensor> = None;
        for (indices, weights) in self.indices.iter().zip(&self.weights) {
            let local: Vec<i64> = indices.iter().map(|index| index - first).collect();
            let indices = Tensor::f_from_slice(&local)?.f_to_device(x.device())?;
            let picked = x.f_index_select(dim as i64, &indices)?;
            if self.indices.len() == 1 {
                return Ok(picked);
            }
            let weights = Tensor::f_from_slice(weights)?.f_to_device(x.device())?.f_to_kind(x.kind())?;
            let term = picked.f_mul(&along(&weights, dim, x.dim())?)?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&term)?,
                None => term,
            });
        }
        sum.map_or_else(|| Ok(x.shallow_clone()), Ok)
    }
}

/// Weights of the four elements around a point, `t` after the second.
fn cubic(t: f64) -> [f64; 4] {
    const A: f64 = -0.75;
    let near = |x: f64| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f64| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]
}

/// Interpolates a dense tensor `[batch, channel, extent…]`.
///
/// # Errors
///
/// Extents below 1; a mode without that number of dims.
pub fn interpolated(x: &Tensor, resize: &Resize, mode: Interpolation, align_corners: bool) -> Result<Tensor> {
    if x.kind() == Kind::Uint8 {
        let y = interpolated(
            &named("interpolate", &[x], x.f_to_kind(Kind::Float))?,
            resize,
            mode,
            align_corners,
        )?;
        return named("interpolate", &[x], to_bytes(&y));
    }
    let (output, scales) = resize.resolve(&x.size(), mode, align_corners)?;
    if mode == Interpolation::Area && x.numel() > 0 {
        return named("interpolate", &[x], means(x, &output));
    }
    let done = vec![false; output.len()];
    let x = named("interpolate", &[x], full(x))?;
    Rest { output: &output, scales: &scales, done: &done, mode, align_corners }.apply(&x)
}

/// Rounds numbers to `Uint8`. libtorch's interpolation of `Uint8` rounds differently on some CPUs, so it is not used.
///
/// # Errors
///
/// libtorch refuses the conversion.
pub fn to_bytes(x: &Tensor) -> Result<Tensor, TchError> {
    x.f_round()?.f_clamp(0.0, 255.0)?.f_to_kind(Kind::Uint8)
}

/// Interpolation with libtorch over the dims that are not done yet.
#[derive(Debug)]
pub struct Rest<'a> {
    /// Extents of the result.
    pub output: &'a [i64],
    /// Scales that positions follow, where given.
    pub scales: &'a [Option<f64>],
    /// Spatial dims that keep their extent.
    pub done: &'a [bool],
    /// Interpolation between elements.
    pub mode: Interpolation,
    /// Align the first and the last elements of input and result.
    pub align_corners: bool,
}

impl Rest<'_> {
    /// Interpolates.
    ///
    /// # Errors
    ///
    /// libtorch refuses the shapes or the dtype.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let shape = x.size();
        let pick = |index: usize| if self.done[index] { shape[index + 2] } else { self.output[index] };
        let output: Vec<i64> = (0..self.output.len()).map(pick).collect();
        // libtorch interpolates no empty tensors.
        if x.numel() == 0 || output.contains(&0) {
            let mut empty = x.shallow_clone();
            for (index, &extent) in output.iter().enumerate() {
                let wider: Vec<i64> = (0..extent).map(|_| 0).collect();
                let indices = named("interpolate", &[x], Tensor::f_from_slice(&wider))?;
                empty = match shape[index + 2] {
                    0 => empty,
                    _ => named("interpolate", &[x], empty.f_index_select(index as i64 + 2, &indices))?,
                };
            }
            return Ok(empty);
        }
        let scale = |index: usize| if self.done[index] { None } else { self.scales[index] };
        let corners = self.align_corners;
        let y = match (self.mode, output.len()) {
            (Interpolation::Nearest, 1) => x.f_upsample_nearest1d(output, scale(0)),
            (Interpolation::Nearest, 2) => x.f_upsample_nearest2d(output, scale(0), scale(1)),
            (Interpolation::Nearest, _) => x.f_upsample_nearest3d(output, scale(0), scale(1), scale(2)),
            (Interpolation::NearestExact, 1) => x.f_internal_upsample_nearest_exact1d(output, scale(0)),
            (Interpolation::NearestExact, 2) => {
                x.f_internal_upsample_nearest_exact2d(output, scale(0), scale(1))
            }
            (Interpolation::NearestExact, _) => {
                x.f_internal_upsample_nearest_exact3d(output, scale(0), scale(1), scale(2))
            }
            (Interpolation::Cubic, _) => x.f_upsample_bicubic2d(output, corners, scale(0), scale(1)),
            (_, 1) => x.f_upsample_linear1d(output, corners, scale(0)),
            (_, 2) => x.f_upsample_bilinear2d(output, corners, scale(0), scale(1)),
            (_, _) => x.f_upsample_trilinear3d(output, corners, scale(0), scale(1), scale(2)),
        };
        named("interpolate", &[x], y)
    }
}
