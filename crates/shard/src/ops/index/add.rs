//! Adding elements where indices say: index_add, scatter_add.

use isobar_collectives::ReduceOp;
use tch::Tensor;

use super::pick::{check_extents, element_route};
use super::route::{Owners, Route};
use super::{is_free, propagate_error, replaced, resolved_indices, split_beside, split_of_indices};
use crate::error::Result;
use crate::layout::{Dim, Layout, Placement};
use crate::ops::parameterised::times_alpha;
use crate::ops::{operator, refuse, resolve, torch};
use crate::promote::Operand;
use crate::rules::Indexing;
use crate::tensor::{ShardTensor, same_mesh};

impl ShardTensor {
    /// This tensor plus, at the places along `dim` that `index` (`Int64`, one dim) names, the elements of `source`. Laid out as this
    /// tensor, and along other dims that this tensor holds in full as the source; only the source's elements travel, to where they
    /// are added.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; indices out of range; the errors of the exchange.
    pub fn index_add(&self, dim: i64, index: &dyn Operand, source: &dyn Operand) -> Result<Self> {
        const OP: &str = "index_add";
        let (index, source) = (&*index.promote(OP, self)?, &*source.promote(OP, self)?);
        operator(OP, &[self, index, source], args!("dim": dim), || {
            same_mesh(OP, &[self, index, source])?;
            let at = resolve(OP, dim, self.ndim())?;
            let fits = source.ndim() == self.ndim()
                && (0..self.ndim()).all(|d| d == at || source.shape()[d] == self.shape()[d])
                && index.shape() == [source.shape()[at]];
            if !fits {
                let shapes = format!("index {:?} and source {:?}", index.shape(), source.shape());
                return refuse(OP, format!("{shapes} do not fit {:?} along dim {at}", self.shape()));
            }
            let (index, source) = (resolved_indices(index)?, source.resolved()?);
            let x = self.resolved()?.consecutive()?;
            let x = x.to_layout(&split_beside(x.layout(), source.layout(), at))?;
            let (along, summed) = walked(&x, &source.layout().dims()[at], at);
            let source =
                source.to_layout(&x.layout().with_dims(replaced(x.layout().dims(), at, along.clone())))?;
            let index = index.to_layout(&index.layout().with_dims(vec![along]))?;
            if x.layout().is_sharded(at) {
                let owners = Owners::new(x.layout(), at)?;
                let found = torch(OP, owners.find(index.local()))?;
                let route = Route::new(OP, &found, &found.place, &owners.group)?;
                let rows = torch(OP, source.local().f_movedim_int(at as i64, 0))?;
                let sums = route.push(OP, &rows, x.local_shape()[at])?;
                let y = torch(OP, sums.f_movedim_int(0, at as i64).and_then(|sums| x.local().f_add(&sums)))?;
                return Ok(Self::new(y, x.layout().clone()));
            }
            if summed.is_empty() {
                let y = x.local().f_index_add(at as i64, index.local(), source.local());
                return Ok(Self::new(propagate_error(OP, x.layout(), y)?, x.layout().clone()));
            }
            let zeros = torch(OP, Tensor::f_zeros(x.local_shape(), (x.kind(), x.device())))?;
            let sums = zeros.f_index_add(at as i64, index.local(), source.local());
            let sums = propagate_error(OP, x.layout(), sums)?;
            x.add(&Self::new(sums, partial(x.layout(), &summed)).resolved()?)
        })
    }

    /// This tensor plus the elements of `source`, each at its own place, but at the place along `dim` that `index` (`Int64`, of the
    /// dims, and at most the source's extents) names; of a larger source its leading part counts. Laid out as this tensor, and along
    /// other dims that this tensor holds in full as the source; only the source's elements travel.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; indices out of range; the errors of the exchange.
    pub fn scatter_add(&self, dim: i64, index: &dyn Operand, source: &dyn Operand) -> Result<Self> {
        const OP: &str = "scatter_add";
        let (index, source) = (&*index.promote(OP, self)?, &*source.promote(OP, self)?);
        operator(OP, &[self, index, source], args!("dim": dim), || {
            same_mesh(OP, &[self, index, source])?;
            let at = resolve(OP, dim, self.ndim())?;
            check_extents(OP, self, index, at)?;
            let covers = source.ndim() == index.ndim()
                && source.shape().iter().zip(index.shape()).all(|(extent, needed)| extent >= needed);
            if !covers {
                let shapes = format!("index {:?} and source {:?}", index.shape(), source.shape());
                return refuse(OP, format!("{shapes}; expected a source at least as large as the index"));
            }
            let (index, mut source) = (resolved_indices(index)?, source.resolved()?);
            // The source's leading part counts.
            for (dim, &extent) in index.shape().iter().enumerate() {
                if extent < source.shape()[dim] {
                    source = source.narrow(dim as i64, 0, extent)?;
                }
            }
            let x = self.resolved()?.consecutive()?;
            let x = x.to_layout(&split_beside(x.layout(), source.layout(), at))?;
            let (along, summed) = walked(&x, &source.layout().dims()[at], at);
            // Along other dims the index reaches so far, and lies with the elements that it walks beside.
            let mut reached = x.shallow_clone();
            for d in (0..x.ndim()).filter(|&d| d != at) {
                if index.shape()[d] < x.shape()[d] {
                    reached = reached.narrow(d as i64, 0, index.shape()[d])?;
                }
            }
            let layout = x.layout().with_dims(replaced(reached.layout().dims(), at, along));
            let (index, source) = (index.to_layout(&layout)?, source.to_layout(&layout)?);
            if x.layout().is_sharded(at) {
                let (route, elements) = element_route(OP, &x, at, index.local())?;
                let flat = torch(OP, source.local().f_reshape([-1]))?;
                let sums = torch(OP, route.push(OP, &flat, elements)?.f_reshape(x.local_shape()))?;
                return Ok(Self::new(torch(OP, x.local().f_add(&sums))?, x.layout().clone()));
            }
            if summed.is_empty() {
                let y = x.local().f_scatter_add(at as i64, index.local(), source.local());
                return Ok(Self::new(propagate_error(OP, x.layout(), y)?, x.layout().clone()));
            }
            let zeros = torch(OP, Tensor::f_zeros(x.local_shape(), (x.kind(), x.device())))?;
            let sums = zeros.f_scatter_add(at as i64, index.local(), source.local());
            let sums = propagate_error(OP, x.layout(), sums)?;
            x.add(&Self::new(sums, partial(x.layout(), &summed)).resolved()?)
        })
    }
}

/// Returns the source's split along the dim, and the axes along which its contribution is a partial sum.
fn walked(x: &ShardTensor, source: &Dim, at: usize) -> (Dim, Vec<usize>) {
    match x.layout().is_sharded(at) {
        true => (split_of_indices(&x.layout().dims()[at], source), Vec::new()),
        false if is_free(source, &x.layout().sharding_axes()) => (source.clone(), source.axes.clone()),
        false => (Dim::whole(source.extent()), Vec::new()),
    }
}

fn partial(layout: &Layout, axes: &[usize]) -> Layout {
    let mut placements = layout.placements().to_vec();
    for &axis in axes {
        placements[axis] = Placement::Partial(ReduceOp::Sum);
    }
    layout.with_placements(placements, layout.dims().to_vec())
}

crate::register! {
    /// Adds slices of `source` times α (`alpha`, 1 if not given) to those along `dim` that `index` names.
    "index_add"(input, index: Index, source: Same; dim; alpha) Indexed(Indexing::ADD): |call| {
        let (x, source) = (call.tensor(0)?, call.tensor(2)?);
        x.index_add(call.get("dim")?, call.tensor(1)?, &times_alpha(call, x, source)?)
    };
    /// Adds elements of `source` to those along `dim` that `index` names.
    "scatter_add"(input, index: Index, source: Same; dim) Indexed(Indexing::ADD):
        |call| call.tensor(0)?.scatter_add(call.get("dim")?, call.tensor(1)?, call.tensor(2)?);
}
