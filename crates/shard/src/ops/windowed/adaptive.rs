//! Adaptive pooling: result `i` of `m` is of the elements from ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉ of `n`.

use tch::{TchError, Tensor};

use super::pool::{check_dims, result_layout};
use super::{Walk, part_of};
use crate::array::named;
use crate::error::Result;
use crate::layout::{Dim, Interval};
use crate::ops::{refuse, rule};
use crate::tensor::ShardTensor;
use crate::window::{Border, Need, Windows, fetch};

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
        self.adaptive("adaptive_avg_pool", output, |x, dim, spans| {
            // Rows of the mean's matrix.
            let window = x.size()[dim];
            let mut rows = vec![0.0; spans.len() * window as usize];
            for (index, &(start, end)) in spans.iter().enumerate() {
                for at in start..end {
                    rows[index * window as usize + at as usize] = 1.0 / (end - start) as f64;
                }
            }
            let matrix = Tensor::f_from_slice(&rows)?.f_view([spans.len() as i64, window])?;
            let matrix = matrix.f_to_device(x.device())?.f_to_kind(x.kind())?;
            let last = x.f_transpose(dim as i64, -1)?.f_matmul(&matrix.f_transpose(0, 1)?)?;
            last.f_transpose(dim as i64, -1)
        })
    }

    /// Maxima over the last `output.len()` (1 to 3) dims such that the result has the extents `output`.
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Extents below 1; the errors of the exchange.
    pub fn adaptive_max_pool(&self, output: &[i64]) -> Result<Self> {
        self.adaptive("adaptive_max_pool", output, |x, dim, spans| {
            let Some(longest) = spans.iter().map(|(start, end)| end - start).max() else {
                return x.f_narrow(dim as i64, 0, 0);
            };
            // Shorter windows end in copies of their first element, which come after it and so are not taken.
            let at = |&(start, end): &(i64, i64)| {
                (0..longest).map(move |i| if start + i < end { start + i } else { start }).collect::<Vec<_>>()
            };
            let indices: Vec<i64> = spans.iter().flat_map(at).collect();
            let indices = Tensor::f_from_slice(&indices)?.f_to_device(x.device())?;
            let picked = x.f_index_select(dim as i64, &indices)?;
            let windows = picked.f_unflatten(dim as i64, [spans.len() as i64, longest])?;
            Ok(windows.f_max_dim(dim as i64 + 1, false)?.0)
        })
    }

    /// Pools dim after dim, the last first: means and maxima of boxes are means of means and maxima of maxima.
    fn adaptive(
        &self,
        op: &'static str,
        output: &[i64],
        f: impl Fn(&Tensor, usize, &[(i64, i64)]) -> Result<Tensor, TchError>,
    ) -> Result<Self> {
        rule(op, &[self], || {
            let spatial = output.len();
            check_dims(op, self, spatial)?;
            if output.iter().any(|&extent| extent < 1) {
                return refuse(op, format!("output {output:?}: expected extents of at least 1"));
            }
            let x = self.resolved()?.consecutive()?;
            let layout = x.layout();
            let first = x.ndim() - spatial;
            let mut windows = Windows::of(layout);
            let mut walks = Vec::with_capacity(spatial);
            let mut results: Vec<Dim> = Vec::with_capacity(spatial);
            for (index, &result) in output.iter().enumerate() {
                let (dim, extent) = (first + index, x.shape()[first + index]);
                if extent < 1 {
                    return refuse(op, format!("dim {dim} has no elements"));
                }
                walks.push(Walk {
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
                    let need = Need::windows(&results[index], extent, Border::Fill, |own| {
                        window(own, extent, result)
                    });
                    windows = windows.with(dim, need);
                }
            }
            let mut y = fetch(x.local(), layout, &windows, 0.0)?;
            for (walk, result) in walks.iter().zip(&results).rev() {
                let own = part_of(result, layout);
                let begin = window(own, walk.extent, walk.result).0;
                let spans: Vec<(i64, i64)> = (own.start..own.end())
                    .map(|index| span(index, walk.extent, walk.result))
                    .map(|(start, end)| (start - begin, end - begin))
                    .collect();
                y = named(op, &[&y], f(&y, walk.dim, &spans))?;
            }
            Ok(Self::new(y, result_layout(&x, &walks, &results)))
        })
    }
}

/// The input that a part of the result needs.
fn window(own: Interval, extent: i64, result: i64) -> (i64, i64) {
    match own.len {
        0 => (0, 0),
        _ => (span(own.start, extent, result).0, span(own.end() - 1, extent, result).1),
    }
}
