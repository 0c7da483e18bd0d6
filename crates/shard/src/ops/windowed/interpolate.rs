//! Interpolation to another extent.

use isobar_array::kernel::{Grid, Rest, WindowGeometry, to_bytes};
use isobar_array::{Interpolation, Resize};
use tch::Kind;

use super::part_of;
use super::pool::result_layout;
use crate::dense::named;
use crate::error::Result;
use crate::layout::Dim;
use crate::ops::{in_full, operator};
use crate::rules::{Call, Footprint, Side};
use crate::tensor::ShardTensor;
use crate::window::{Border, HaloSpec, Windows, fetch};

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
        let args = || resize.args(mode.name(self.ndim().saturating_sub(2)), align_corners);
        operator(OP, &[self], args, || {
            if self.kind() == Kind::Uint8 {
                let y = self.to_kind(Kind::Float)?.interpolate(resize, mode, align_corners)?;
                return Ok(Self::new(named(OP, &[y.local()], to_bytes(y.local()))?, y.layout().clone()));
            }
            let (output, scales) = resize.resolve(self.shape(), mode, align_corners)?;
            let (extents, spatial) = (&self.shape()[2..], output.len());
            if mode == Interpolation::Area {
                return self.adaptive_avg_pool(&output);
            }
            let x = in_full(OP, &self.resolved()?.consecutive_along(|dim| dim > 0)?)?;
            let layout = x.layout();
            let single = x.kind() != Kind::Double;
            let mut windows = Windows::own(layout);
            let mut geometries = Vec::with_capacity(spatial);
            let mut results: Vec<Dim> = Vec::with_capacity(spatial);
            let mut taps = Vec::new();
            for index in 0..spatial {
                let (dim, from, to) = (index + 2, extents[index], output[index]);
                let grid = Grid { from, to, scale: scales[index], align_corners, single, mode };
                geometries.push(WindowGeometry {
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
                    let need = HaloSpec::windows(&results[index], from, Border::Fill, |own| {
                        grid.window(own.start..own.end())
                    });
                    windows = windows.with(dim, need);
                    let own = part_of(&results[index], layout);
                    taps.push((dim, grid, own.start..own.end()));
                }
            }
            let mut y = fetch(x.local(), layout, &windows, 0.0)?;
            for (dim, grid, own) in &taps {
                y = named(OP, &[&y], grid.taps(own.clone()).apply(&y, *dim, grid.window(own.clone()).0))?;
            }
            if taps.len() < spatial {
                let done: Vec<bool> = (0..spatial).map(|index| layout.is_sharded(index + 2)).collect();
                let rest = Rest { output: &output, scales: &scales, done: &done, mode, align_corners };
                y = rest.apply(&y)?;
            }
            Ok(Self::new(y, result_layout(&x, &geometries, &results)))
        })
    }
}

crate::register! {
    /// The field on a grid of another `size`, or of `scale_factor` times as many points, by `mode`.
    "interpolate"(input: FloatingOrUint8; size, scale_factor, mode, align_corners; recompute_scale_factor, antialias) Halo(window_of):
        |call| interpolate(call);
}

/// Returns the window along a dim, to bound the bytes: that of the widest kernel, the cubic one.
fn window_of(call: &Footprint<'_>, side: &Side) -> Result<(i64, i64)> {
    if side.dim < 2 {
        return Ok(side.shard);
    }
    let Some((start, end)) = side.own else { return Ok((0, 0)) };
    let (n, m) = (side.extent, side.result);
    let step = match call.attr("align_corners")?.unwrap_or(false) {
        true => (n - 1) as f64 / (m - 1).max(1) as f64,
        false => n as f64 / m as f64,
    };
    Ok(((start as f64 * step) as i64 - 3, (end as f64 * step) as i64 + 4))
}

fn interpolate(call: &Call<'_>) -> Result<ShardTensor> {
    let mode = match &call.word("mode", "nearest")?[..] {
        "nearest" => Interpolation::Nearest,
        "nearest-exact" => Interpolation::NearestExact,
        "linear" | "bilinear" | "trilinear" => Interpolation::Linear,
        "bicubic" => Interpolation::Cubic,
        "area" => Interpolation::Area,
        other => {
            let known = "nearest, nearest-exact, linear, bilinear, trilinear, bicubic or area";
            return call.refuse(format!("mode = \"{other}\"; expected {known}"));
        }
    };
    call.only("antialias", false)?;
    call.either("size", "scale_factor")?;
    let x = call.tensor(0)?;
    let scales: Vec<f64> = call.list("scale_factor", Vec::new())?;
    let resize = match scales.is_empty() {
        true => Resize::Size(call.list("size", Vec::new())?),
        false if call.or("recompute_scale_factor", false)? => {
            // The scale only gives the extents; positions follow these.
            let extents = x.shape().iter().skip(2).enumerate();
            let scaled = extents.map(|(i, &extent)| (extent as f64 * scales[i % scales.len()]) as i64);
            Resize::Size(scaled.collect())
        }
        false => Resize::Scale(scales),
    };
    x.interpolate(&resize, mode, call.or("align_corners", false)?)
}
