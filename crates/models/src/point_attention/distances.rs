//! Distances of the points of a grid from those of a reference grid.

use std::sync::Arc;

use isobar_array::{Array, Window, kernel};
use isobar_shard::Params;
use tch::{Kind, TchError, Tensor};

use crate::error::Result;
use crate::layers::zeros;

/// Name of the distances in the state dict.
const NAME: &str = "embedding";

/// Distances of the points of a grid from the ref × ref points of a reference grid, both on the unit square; computed in single
/// precision, as in PhysicsNeMo.
#[derive(Debug, Clone, Copy)]
pub(super) struct Distances {
    /// Rows and columns of the grid.
    extents: [i64; 2],
    /// Rows, and columns, of the reference grid.
    reference: i64,
}

impl Distances {
    /// Adds the distances to the state dict, `[1, rows · columns, ref²]`.
    pub(super) fn new(
        extents: [i64; 2],
        reference: i64,
        params: &mut impl Params<Array: Array>,
    ) -> Result<Self> {
        let distances = Self { extents, reference };
        let shape = [1, extents[0] * extents[1], reference * reference];
        let values = move |part: &Window| kernel::named(NAME, &[], distances.part(part));
        params.computed_buffer(NAME, &shape, Arc::new(values))?;
        Ok(distances)
    }

    /// Computes the distances of points `[batch, rows, columns, features]`, `[batch, rows, columns, ref²]`. Each rank computes those of
    /// its own points.
    pub(super) fn beside<A: Array>(&self, x: &A) -> Result<A> {
        let dims = x.shape().len() - 1;
        let distances =
            |like: &Tensor, at: &[Tensor]| self.of([&at[1], &at[2]])?.f_unsqueeze(0)?.f_to_kind(like.kind());
        let named = |like: &Tensor, at: &[Tensor]| kernel::named(NAME, &[], distances(like, at));
        Ok(zeros(&[1], x)?.on_shards_of(x, dims, &named)?)
    }

    /// Distances of the points in these rows and columns, `[rows, columns, ref²]`.
    fn of(&self, at: [&Tensor; 2]) -> Result<Tensor, TchError> {
        let squares = |dim: usize| {
            let on_device = |line: &[f32]| Tensor::f_from_slice(line)?.f_to(at[dim].device());
            let own = on_device(&line(self.extents[dim]))?.f_index_select(0, at[dim])?;
            own.f_unsqueeze(1)?.f_sub(&on_device(&line(self.reference))?)?.f_square()
        };
        let rows = squares(0)?.f_reshape([-1, 1, self.reference, 1])?;
        let columns = squares(1)?.f_reshape([1, -1, 1, self.reference])?;
        let extents = [at[0].size()[0], at[1].size()[0], self.reference * self.reference];
        rows.f_add(&columns)?.f_sqrt_()?.f_reshape(extents)
    }

    /// Computes a box of the tensor in the state dict.
    fn part(&self, part: &Window) -> Result<Tensor, TchError> {
        let [(_, samples), (first, points), (from, references)] =
            [0, 1, 2].map(|dim| (part.offset()[dim], part.shape()[dim]));
        let columns = self.extents[1];
        let (start, end) = (first / columns, (first + points + columns - 1) / columns);
        let range =
            |start: i64, end: i64| Tensor::f_arange_start(start, end, (Kind::Int64, tch::Device::Cpu));
        let rows = self.of([&range(start, end)?, &range(0, columns)?])?;
        let rows = rows.f_reshape([1, -1, self.reference * self.reference])?;
        let rows = rows.f_narrow(1, first - start * columns, points)?.f_narrow(2, from, references)?;
        rows.f_narrow(0, 0, samples)
    }
}

/// `count` evenly spaced numbers from 0 to 1, rounded as NumPy does.
fn line(count: i64) -> Vec<f32> {
    let step = ((count - 1).max(1) as f64).recip();
    (0..count).map(|at| if at > 0 && at == count - 1 { 1.0 } else { (at as f64 * step) as f32 }).collect()
}
