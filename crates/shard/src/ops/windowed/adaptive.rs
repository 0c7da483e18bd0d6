//! Adaptive pooling: result `i` of `m` is of the elements from ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉ of `n`.

use isobar_array::kernel::{WindowGeometry, along, check_dims, means, spatial_name};
use tch::{TchError, Tensor};

use super::part_of;
use super::pool::result_layout;
use crate::dense::named;
use crate::error::Result;
use crate::layout::{Dim, Interval};
use crate::ops::{operator, refuse, torch, wide};
use crate::rules::{Call, Footprint, Side};
use crate::tensor::ShardTensor;
use crate::window::{Border, HaloSpec, Windows, fetch};

/// The elements of a result.
fn span(index: i64, from: i64, to: i64) -> (i64, i64) {
    (index * from / to, ((index + 1) * from + to - 1) / to)
}

impl ShardTensor {
    /// Means over the last `output.len()` (1 to 3) dims such that the result has the extents `output`.
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Extents below 1; the errors of the exchange.
    pub fn adaptive_avg_pool(&self, output: &[i64]) -> Result<Self> {
        self.adaptive(
            "adaptive_avg_pool",
            ["adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"],
            output,
            |x, dim, spans| {
                let (windows, longest) = spans_of(x, dim, spans)?;
                // Copies that fill up a shorter window do not count, infinite or not.
                let copies: Vec<bool> = spans
                    .iter()
                    .flat_map(|(start, end)| (0..longest).map(move |i| start + i >= *end))
                    .collect();
                let mut shape = vec![1; x.dim() + 1];
                (shape[dim], shape[dim + 1]) = (spans.len() as i64, longest);
                let copies =
                    Tensor::f_from_slice(&copies)?.f_to_device(x.device())?.f_view(shape.as_slice())?;
                let sums = windows.f_masked_fill(&copies, 0)?;
                let sums = sums.f_sum_dim_intlist([dim as i64 + 1].as_slice(), false, None)?;
                let counts: Vec<i64> = spans.iter().map(|(start, end)| end - start).collect();
                let counts = Tensor::f_from_slice(&counts)?.f_to_device(x.device())?.f_to_kind(x.kind())?;
                sums.f_div(&along(&counts, dim, x.dim())?)
            },
            means,
        )
    }

    /// Maxima over the last `output.len()` (1 to 3) dims such that the result has the extents `output`.
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Extents below 1; the errors of the exchange.
    pub fn adaptive_max_pool(&self, output: &[i64]) -> Result<Self> {
        self.adaptive(
            "adaptive_max_pool",
            ["adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"],
            output,
            |x, dim, spans| {
                let (windows, _) = spans_of(x, dim, spans)?;
                if spans.is_empty() {
                    return x.f_narrow(dim as i64, 0, 0);
                }
                Ok(windows.f_max_dim(dim as i64 + 1, false)?.0)
            },
            |x, output| {
                Ok(match output.len() {
                    1 => x.f_adaptive_max_pool1d(output)?.0,
                    2 => x.f_adaptive_max_pool2d(output)?.0,
                    _ => x.f_adaptive_max_pool3d(output)?.0,
                })
            },
        )
    }

    /// Pools dim after dim, the last first: means and maxima of boxes are means of means and maxima of maxima.
    fn adaptive(
        &self,
        op: &'static str,
        names: [&'static str; 3],
        output: &[i64],
        f: impl Fn(&Tensor, usize, &[(i64, i64)]) -> Result<Tensor, TchError>,
        whole: fn(&Tensor, &[i64]) -> Result<Tensor, TchError>,
    ) -> Result<Self> {
        let spatial = output.len();
        operator(spatial_name(names, spatial), &[self], args!("output_size": output), || {
            check_dims(op, self.shape(), spatial)?;
            if output.iter().any(|&extent| extent < 1) {
                return refuse(op, format!("output {output:?}: expected extents of at least 1"));
            }
            let x = self.resolved()?.consecutive()?;
            let layout = x.layout();
            let first = x.ndim() - spatial;
            let mut windows = Windows::own(layout);
            let mut geometries = Vec::with_capacity(spatial);
            let mut results: Vec<Dim> = Vec::with_capacity(spatial);
            for (index, &result) in output.iter().enumerate() {
                let (dim, extent) = (first + index, x.shape()[first + index]);
                if extent < 1 {
                    return refuse(op, format!("dim {dim} has no elements"));
                }
                geometries.push(WindowGeometry {
                    dim,
                    extent,
                    result,
                    kernel: 1,
                    stride: 1,
                    dilation: 1,
                    before: 0,
                    after: 0,
                });
                results.push(layout.dims()[dim].scaled(result));
                if layout.is_sharded(dim) {
                    let need = HaloSpec::windows(&results[index], extent, Border::Fill, |own| {
                        window(own, extent, result)
                    });
                    windows = windows.with(dim, need);
                }
            }
            let mut y = fetch(x.local(), layout, &windows, 0.0)?;
            let kind = y.kind();
            y = torch(op, wide(&y))?;
            for (geometry, result) in geometries.iter().zip(&results).rev() {
                if !layout.is_sharded(geometry.dim) {
                    continue;
                }
                let own = part_of(result, layout);
                let begin = window(own, geometry.extent, geometry.result).0;
                let spans: Vec<(i64, i64)> = (own.start..own.end())
                    .map(|index| span(index, geometry.extent, geometry.result))
                    .map(|(start, end)| (start - begin, end - begin))
                    .collect();
                y = named(op, &[&y], f(&y, geometry.dim, &spans))?;
            }
            // Dims that are not split are left to libtorch; the others have their extents.
            if geometries.iter().any(|geometry| !layout.is_sharded(geometry.dim)) {
                y = named(op, &[&y], dense(&y, &results, layout, whole))?;
            }
            Ok(Self::new(torch(op, y.f_to_kind(kind))?, result_layout(&x, &geometries, &results)))
        })
    }
}

/// The dense operator to these extents. It knows no empty tensors.
fn dense(
    x: &Tensor,
    results: &[Dim],
    layout: &crate::layout::Layout,
    whole: fn(&Tensor, &[i64]) -> Result<Tensor, TchError>,
) -> Result<Tensor, TchError> {
    let output: Vec<i64> = results.iter().map(|result| part_of(result, layout).len).collect();
    if x.numel() > 0 {
        return whole(x, &output);
    }
    let first = x.dim() - results.len();
    let mut y = x.shallow_clone();
    for (index, &extent) in output.iter().enumerate() {
        let dim = (first + index) as i64;
        if x.size()[first + index] != extent && x.size()[first + index] > 0 {
            let indices = Tensor::f_zeros([extent], (tch::Kind::Int64, x.device()))?;
            y = y.f_index_select(dim, &indices)?;
        }
    }
    Ok(y)
}

/// The windows along a dim as a dim of their own after it, and the extent of the longest. Shorter ones end in copies of their
/// first element, which come after it, so that of equal maxima the first is taken.
fn spans_of(x: &Tensor, dim: usize, spans: &[(i64, i64)]) -> Result<(Tensor, i64), TchError> {
    let longest = spans.iter().map(|(start, end)| end - start).max().unwrap_or(1);
    let at = |&(start, end): &(i64, i64)| {
        (0..longest).map(move |i| if start + i < end { start + i } else { start }).collect::<Vec<_>>()
    };
    let indices: Vec<i64> = spans.iter().flat_map(at).collect();
    let indices = Tensor::f_from_slice(&indices)?.f_to_device(x.device())?;
    let picked = x.f_index_select(dim as i64, &indices)?;
    let mut shape = x.size();
    shape.splice(dim..=dim, [spans.len() as i64, longest]);
    Ok((picked.f_reshape(shape)?, longest))
}

/// The input that a part of the result needs.
fn window(own: Interval, extent: i64, result: i64) -> (i64, i64) {
    match own.len {
        0 => (0, 0),
        _ => (span(own.start, extent, result).0, span(own.end() - 1, extent, result).1),
    }
}

crate::register! {
    /// Means that make the last dim `output_size`.
    "adaptive_avg_pool1d"(input: Floating; output_size) Halo(|call, side| window_of(call, side, 1)):
        |call| call.tensor(0)?.adaptive_avg_pool(&output_size(call, 1)?);
    /// Means that make the last 2 dims `output_size`.
    "adaptive_avg_pool2d"(input: Floating; output_size) Halo(|call, side| window_of(call, side, 2)):
        |call| call.tensor(0)?.adaptive_avg_pool(&output_size(call, 2)?);
    /// Means that make the last 3 dims `output_size`.
    "adaptive_avg_pool3d"(input: Floating; output_size) Halo(|call, side| window_of(call, side, 3)):
        |call| call.tensor(0)?.adaptive_avg_pool(&output_size(call, 3)?);
    /// Maxima that make the last dim `output_size`.
    "adaptive_max_pool1d"(input: Floating; output_size) Halo(|call, side| window_of(call, side, 1)):
        |call| call.tensor(0)?.adaptive_max_pool(&output_size(call, 1)?);
    /// Maxima that make the last 2 dims `output_size`.
    "adaptive_max_pool2d"(input: Floating; output_size) Halo(|call, side| window_of(call, side, 2)):
        |call| call.tensor(0)?.adaptive_max_pool(&output_size(call, 2)?);
    /// Maxima that make the last 3 dims `output_size`.
    "adaptive_max_pool3d"(input: Floating; output_size) Halo(|call, side| window_of(call, side, 3)):
        |call| call.tensor(0)?.adaptive_max_pool(&output_size(call, 3)?);
}

/// Returns the window along a dim, to bound the bytes.
fn window_of(call: &Footprint<'_>, side: &Side, spatial: usize) -> Result<(i64, i64)> {
    if side.dim + spatial < call.ndim() {
        return Ok(side.shard);
    }
    let Some((start, end)) = side.own else { return Ok((0, 0)) };
    let (n, m) = (side.extent, side.result.max(1));
    Ok((start * n / m, (end * n + m - 1) / m))
}

/// The result's extents, of which those not given are the input's.
fn output_size(call: &Call<'_>, spatial: usize) -> Result<Vec<i64>> {
    let x = call.tensor(0)?;
    let given: Vec<Option<i64>> = call.list("output_size", Vec::new())?;
    if given.len() > 1 && given.len() != spatial {
        return call.refuse(format!("output_size has {} extents; expected 1 or {spatial}", given.len()));
    }
    let own = |index: usize| x.shape().get(x.ndim().saturating_sub(spatial) + index).copied().unwrap_or(1);
    let of = |index: usize| given.get(if given.len() == 1 { 0 } else { index }).copied().flatten();
    Ok((0..spatial).map(|index| of(index).unwrap_or_else(|| own(index))).collect())
}
