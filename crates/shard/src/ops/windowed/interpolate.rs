//! Interpolation to another extent.

use tch::{TchError, Tensor};

use super::adaptive::means;
use super::pool::{check_dims, result_layout};
use super::{Walk, along, part_of, spatial_name};
use crate::array::named;
use crate::error::Result;
use crate::layout::{Dim, Interval};
use crate::ops::{operator, refuse};
use crate::tensor::ShardTensor;
use crate::window::{Border, Need, Windows, fetch};

/// What a value between elements is.
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
    /// PyTorch's name for it, over so many spatial dims.
    fn name(self, spatial: usize) -> &'static str {
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

/// The elements that each result is made of, and their weights.
struct Taps {
    indices: Vec<Vec<i64>>,
    weights: Vec<Vec<f64>>,
}

/// How results lie over elements along one dim.
#[derive(Clone, Copy)]
struct Grid {
    from: i64,
    to: i64,
    scale: Option<f64>,
    align_corners: bool,
    /// Whether libtorch computes positions in fp32.
    single: bool,
    mode: Interpolation,
}

impl ShardTensor {
    /// Interpolates over the spatial dims of `[batch, channel, extent…]`, 1 to 3 of them. With `align_corners`, the first and
    /// the last elements of input and result lie on each other (of [`Interpolation::Linear`] and [`Interpolation::Cubic`]).
    ///
    /// Positions are those of the global tensor, so that the result is the dense one on every layout, at every scale. All
    /// ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Extents below 1; a mode that these dims do not have; the errors of the exchange.
    pub fn interpolate(&self, resize: &Resize, mode: Interpolation, align_corners: bool) -> Result<Self> {
        const OP: &str = "interpolate";
        let args = || {
            let (size, scale) = match resize {
                Resize::Size(size) => (Some(size), None),
                Resize::Scale(scale) => (None, Some(scale)),
            };
            let mode = mode.name(self.ndim().saturating_sub(2));
            args!("size": size, "scale_factor": scale, "mode": mode, "align_corners": align_corners)()
        };
        operator(OP, &[self], args, || {
            let (output, scales) = resize.resolve(self.shape(), mode, align_corners)?;
            let (extents, spatial) = (&self.shape()[2..], output.len());
            if mode == Interpolation::Area {
                return self.adaptive_avg_pool(&output);
            }
            let x = self.resolved()?.consecutive()?;
            let layout = x.layout();
            let single = x.kind() != tch::Kind::Double;
            let mut windows = Windows::of(layout);
            let mut walks = Vec::with_capacity(spatial);
            let mut results: Vec<Dim> = Vec::with_capacity(spatial);
            let mut taps = Vec::new();
            for index in 0..spatial {
                let (dim, from, to) = (index + 2, extents[index], output[index]);
                let grid = Grid { from, to, scale: scales[index], align_corners, single, mode };
                walks.push(Walk {
                    dim,
                    extent: from,
                    result: to,
                    kernel: 1,
                    stride: 1,
                    dilation: 1,
                    before: 0,
                    after: 0,
                });
                results.push(layout.dims()[dim].scaled(to));
                if layout.is_sharded(dim) {
                    let need = Need::windows(&results[index], from, Border::Fill, |own| grid.window(own));
                    windows = windows.with(dim, need);
                    taps.push((dim, grid, part_of(&results[index], layout)));
                }
            }
            let mut y = fetch(x.local(), layout, &windows, 0.0)?;
            for (dim, grid, own) in &taps {
                y = named(OP, &[&y], grid.taps(*own).apply(&y, *dim, grid.window(*own).0))?;
            }
            if taps.len() < spatial {
                let done: Vec<bool> = (0..spatial).map(|index| layout.is_sharded(index + 2)).collect();
                let rest = Rest { output: &output, scales: &scales, done: &done, mode, align_corners };
                y = rest.apply(&y)?;
            }
            Ok(Self::new(y, result_layout(&x, &walks, &results)))
        })
    }
}

impl Resize {
    /// Extents of the result of an interpolation, and the scales that positions follow where they are given.
    fn resolve(
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

    /// Where a result lies, in elements.
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
        // libtorch computes these in fp32 whatever the kind.
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

    /// The elements that a part of the result needs.
    fn window(&self, own: Interval) -> (i64, i64) {
        let taps = (own.start..own.end()).flat_map(|index| self.of(index).0);
        let (first, last) = taps.fold((i64::MAX, -1), |(low, high), tap| (low.min(tap), high.max(tap)));
        if last < 0 { (0, 0) } else { (first, last + 1) }
    }

    fn taps(&self, own: Interval) -> Taps {
        let width = match self.mode {
            Interpolation::Nearest | Interpolation::NearestExact => 1,
            Interpolation::Linear => 2,
            _ => 4,
        };
        let mut taps = Taps { indices: vec![Vec::new(); width], weights: vec![Vec::new(); width] };
        for index in own.start..own.end() {
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
    /// The results along `dim` of a window that begins at `first`.
    fn apply(&self, x: &Tensor, dim: usize, first: i64) -> Result<Tensor, TchError> {
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

/// The dense operator.
pub(crate) fn interpolated(
    x: &Tensor,
    resize: &Resize,
    mode: Interpolation,
    align_corners: bool,
) -> Result<Tensor> {
    let (output, scales) = resize.resolve(&x.size(), mode, align_corners)?;
    if mode == Interpolation::Area && x.numel() > 0 {
        return named("interpolate", &[x], means(x, &output));
    }
    let done = vec![false; output.len()];
    Rest { output: &output, scales: &scales, done: &done, mode, align_corners }.apply(x)
}

/// The dims that are not split, left to libtorch; along those that are done, the extents stay.
struct Rest<'a> {
    output: &'a [i64],
    scales: &'a [Option<f64>],
    done: &'a [bool],
    mode: Interpolation,
    align_corners: bool,
}

impl Rest<'_> {
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
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
