//! Picking elements: index_select, gather, embedding.

use tch::Tensor;

use super::route::{Owners, Route};
use super::{is_free, propagate_error, replaced, resolved_indices, split_beside, split_of_indices};
use crate::error::{Error, Result};
use crate::layout::Dim;
use crate::ops::{operator, refuse, resolve, torch};
use crate::promote::Operand;
use crate::rules::Indexing;
use crate::tensor::{ShardTensor, same_mesh};

impl ShardTensor {
    /// The elements that `index` (`Int64`, one dim) names along `dim`, split as the index is, or, where the dim is split, over
    /// the same ranks. Only what is named travels, and the names.
    ///
    /// # Errors
    ///
    /// A dim that does not exist; indices out of range: an error on all ranks that share a split dim, and along a whole one on
    /// the ranks that ask, which the others get at their next call on the mesh; the errors of the exchange.
    pub fn index_select(&self, dim: i64, index: &dyn Operand) -> Result<Self> {
        const OP: &str = "index_select";
        let index = &*index.promote(OP, self)?;
        operator(OP, &[self, index], args!("dim": dim), || {
            same_mesh(OP, &[self, index])?;
            let at = resolve(OP, dim, self.ndim())?;
            if index.ndim() != 1 {
                return refuse(OP, format!("index {:?} has not one dim", index.shape()));
            }
            let (x, mut index) = (self.resolved()?, resolved_indices(index)?);
            if !x.layout().is_sharded(at) {
                if !is_free(&index.layout().dims()[0], &x.layout().sharding_axes()) {
                    index = index.replicate_where(|_| true)?;
                }
                let along = index.layout().dims()[0].clone();
                let y = x.mark_varying(&along.axes)?.f_index_select(at as i64, index.local());
                let y = propagate_error(OP, x.layout(), y)?;
                return Ok(Self::new(y, x.layout().with_dim(at, along)));
            }
            let x = x.consecutive()?;
            let along = split_of_indices(&x.layout().dims()[at], &index.layout().dims()[0]);
            let index = index.to_layout(&index.layout().with_dims(vec![along.clone()]))?;
            let owners = Owners::new(x.layout(), at)?;
            let found = torch(OP, owners.find(index.local()))?;
            let route = Route::new(OP, &found, &found.place, &owners.group)?;
            let rows = torch(OP, x.local().f_movedim_int(at as i64, 0))?;
            let y = torch(OP, route.pull(OP, &rows)?.f_movedim_int(0, at as i64))?;
            Ok(Self::new(y, x.layout().with_dim(at, along)))
        })
    }

    /// For each element of `index` (`Int64`, as many dims), the element of this tensor at the same place, but at that index along
    /// `dim`. The index's extents along other dims are at most this tensor's; splits of the index along other dims that this tensor
    /// holds in full are kept. Only what is named travels.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; indices out of range: an error on all ranks that share a split dim, and along a whole one on
    /// the ranks that ask, which the others get at their next call on the mesh; the errors of the exchange.
    pub fn gather(&self, dim: i64, index: &dyn Operand) -> Result<Self> {
        const OP: &str = "gather";
        let index = &*index.promote(OP, self)?;
        operator(OP, &[self, index], args!("dim": dim), || {
            same_mesh(OP, &[self, index])?;
            let at = resolve(OP, dim, self.ndim())?;
            check_extents(OP, self, index, at)?;
            let mut x = self.resolved()?.consecutive()?;
            for d in (0..x.ndim()).filter(|&d| d != at) {
                if index.shape()[d] < x.shape()[d] {
                    x = x.narrow(d as i64, 0, index.shape()[d])?;
                }
            }
            let index = resolved_indices(index)?;
            let x = x.to_layout(&split_beside(x.layout(), index.layout(), at))?;
            let own = &index.layout().dims()[at];
            let split = x.layout().is_sharded(at);
            let along = match split {
                true => split_of_indices(&x.layout().dims()[at], own),
                false if is_free(own, &x.layout().sharding_axes()) => own.clone(),
                false => Dim::whole(own.extent()),
            };
            let layout = x.layout().with_dims(replaced(x.layout().dims(), at, along.clone()));
            let index = index.to_layout(&layout)?;
            let y = match split {
                false => {
                    let y = x.mark_varying(&along.axes)?.f_gather(at as i64, index.local(), false);
                    propagate_error(OP, x.layout(), y)?
                }
                true => {
                    let (route, _) = element_route(OP, &x, at, index.local())?;
                    let flat = torch(OP, x.local().f_reshape([-1]))?;
                    torch(OP, route.pull(OP, &flat)?.f_reshape(index.local_shape()))?
                }
            };
            Ok(Self::new(y, layout))
        })
    }

    /// The rows of this `[count, features]` table that `indices` (`Int64`, any shape) name: `[…, features]`.
    ///
    /// # Errors
    ///
    /// A tensor of other than two dims; indices out of range; the errors of the exchange.
    pub fn embedding(&self, indices: &dyn Operand) -> Result<Self> {
        const OP: &str = "embedding";
        let indices = &*indices.promote(OP, self)?;
        operator(OP, &[indices, self], args!(), || {
            let &[_, features] = self.shape() else { return refuse(OP, "expected a table of two dims") };
            let shape = [indices.shape(), &[features]].concat();
            let rows = self.index_select(0, &indices.resolved()?.reshape(&[-1])?);
            // The operator that was called tells.
            let rows = rows.map_err(|error| match error {
                Error::Sharded { source, .. } => *source,
                error => error,
            });
            rows?.reshape(&shape)
        })
    }
}

/// The extents of an index that walks along a tensor's dim.
pub(super) fn check_extents(op: &'static str, x: &ShardTensor, index: &ShardTensor, at: usize) -> Result<()> {
    let fits = |d: usize| d == at || index.shape()[d] <= x.shape()[d];
    if index.ndim() != x.ndim() || !(0..x.ndim()).all(fits) {
        return refuse(op, format!("index {:?} does not fit {:?} along dim {at}", index.shape(), x.shape()));
    }
    Ok(())
}

/// The way of single elements of the ranks' flattened parts of `x`, whose dims but `at` the index's rank shares; and the number of
/// elements of this rank's part.
pub(super) fn element_route(
    op: &'static str,
    x: &ShardTensor,
    at: usize,
    index: &Tensor,
) -> Result<(Route, i64)> {
    let owners = Owners::new(x.layout(), at)?;
    let shape = x.local_shape();
    let place = || -> Result<_, tch::TchError> {
        let found = owners.find(index)?;
        // Row-major in the owner's part, which has this rank's extents but along `at`.
        let mut place = index.f_zeros_like()?;
        for (dim, &extent) in shape.iter().enumerate() {
            place = match dim == at {
                true => place.f_mul(&found.extent)?.f_add(&found.place)?,
                false => {
                    let along: Vec<i64> = (0..shape.len()).map(|d| if d == dim { -1 } else { 1 }).collect();
                    let count = index.size()[dim];
                    let coordinates = Tensor::f_arange(count, (tch::Kind::Int64, index.device()))?;
                    place.f_mul_scalar(extent)?.f_add(&coordinates.f_view(along.as_slice())?)?
                }
            };
        }
        Ok((found, place))
    };
    let (found, place) = torch(op, place())?;
    Ok((Route::new(op, &found, &place, &owners.group)?, shape.iter().product()))
}

crate::register! {
    /// The slices along `dim` that `index` names.
    "index_select"(input, index: Index; dim) Indexed(Indexing::PICK):
        |call| call.tensor(0)?.index_select(call.get("dim")?, call.tensor(1)?);
    /// The elements along `dim` that `index` names, each for its row.
    "gather"(input, index: Index; dim) Indexed(Indexing::PICK): |call| call.tensor(0)?.gather(call.get("dim")?, call.tensor(1)?);
    /// The rows of the table `weight` that the indices name.
    "embedding"(input: Index, weight) Indexed(Indexing::ROWS): |call| call.tensor(1)?.embedding(call.tensor(0)?);
}
