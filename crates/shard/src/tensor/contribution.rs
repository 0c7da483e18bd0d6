//! Tensors whose gradients are left pending: each rank's is its contribution, and nobody has added them up yet.

use std::sync::Arc;

use isobar_collectives::{LinearMap, attach, copy_to_parallel_region};
use isobar_torch::guard::is_grad_enabled;
use tch::{TchError, Tensor};

use super::ShardTensor;
use crate::dense::named;
use crate::error::Result;
use crate::layout::Layout;

/// A gradient that is left pending.
#[derive(Debug)]
pub(super) struct UnreducedGrad {
    /// Tensor in which it arrives: the local shard, with each rank's contribution.
    raw: Tensor,
    /// The axes of the mesh over which contributions are still to be summed.
    axes: Vec<usize>,
}

impl UnreducedGrad {
    pub(super) fn shallow_clone(&self) -> Self {
        Self { raw: self.raw.shallow_clone(), axes: self.axes.clone() }
    }

    pub(super) fn zero_grad(&mut self) {
        self.raw.zero_grad();
    }
}

impl ShardTensor {
    /// The part `raw` of a tensor that is not partial. Gradients arrive in `raw` as contributions, to be summed over the ranks
    /// along these axes of the mesh: the operators that use it for a computation of each rank's own bring theirs without
    /// communication along them. Elsewhere every rank computes the whole gradient of its part, and brings a share of it.
    pub(crate) fn contributed(raw: Tensor, layout: Layout, axes: &[usize]) -> Result<Self> {
        if !raw.requires_grad() || !is_grad_enabled() {
            return Ok(Self::new(raw, layout));
        }
        let local = shared_out(&raw, copies(&layout, axes))?;
        let pending = Some(UnreducedGrad { raw, axes: axes.to_vec() });
        Ok(Self { local, layout, pending, watched: None })
    }

    /// The tensor of that layout whose parts `f` computes from the parts: a linear function without communication, such as a
    /// view. A pending gradient stays pending.
    pub(crate) fn viewed(
        &self,
        op: &'static str,
        layout: Layout,
        f: impl Fn(&Tensor) -> Result<Tensor, TchError>,
    ) -> Result<Self> {
        let mut view = match &self.pending {
            Some(UnreducedGrad { raw, axes }) => Self::contributed(named(op, &[], f(raw))?, layout, axes)?,
            None => Self::new(named(op, &[], f(&self.local))?, layout),
        };
        view.watched = self.watched.clone();
        Ok(view)
    }

    /// The tensor of that layout whose parts `f` joins from those of several, all sharded along its axes.
    pub(crate) fn joined(
        op: &'static str,
        tensors: &[Self],
        layout: Layout,
        f: impl Fn(&[&Tensor]) -> Result<Tensor, TchError>,
    ) -> Result<Self> {
        let pending: Option<Vec<&UnreducedGrad>> =
            tensors.iter().map(|tensor| tensor.pending.as_ref()).collect();
        match pending.as_deref() {
            Some([first, others @ ..]) if others.iter().all(|other| other.axes == first.axes) => {
                let raw: Vec<&Tensor> =
                    [first].into_iter().chain(others).map(|pending| &pending.raw).collect();
                Self::contributed(named(op, &[], f(&raw))?, layout, &first.axes)
            }
            _ => {
                let locals: Vec<&Tensor> = tensors.iter().map(|tensor| &tensor.local).collect();
                Ok(Self::new(named(op, &[], f(&locals))?, layout))
            }
        }
    }

    /// This rank's part for a computation that differs from rank to rank along these axes, along which the tensor is
    /// replicated: its gradients are added up over them, unless they are left pending.
    pub(crate) fn mark_varying(&self, axes: &[usize]) -> Result<Tensor> {
        if axes.is_empty() || !self.local.requires_grad() || !is_grad_enabled() {
            return Ok(self.local.shallow_clone());
        }
        let (part, summed) = match &self.pending {
            Some(UnreducedGrad { raw, axes: left }) => {
                let alike: Vec<usize> = left.iter().copied().filter(|axis| !axes.contains(axis)).collect();
                let summed = axes.iter().copied().filter(|axis| !left.contains(axis)).collect();
                (shared_out(raw, copies(&self.layout, &alike))?, summed)
            }
            None => (self.local.shallow_clone(), axes.to_vec()),
        };
        if summed.is_empty() {
            return Ok(part);
        }
        let group = self.layout.group_along(&summed)?;
        Ok(if group.size() == 1 { part } else { copy_to_parallel_region(&part, &group)? })
    }

    /// Returns whether a gradient that arrives as slices along these axes may stay unreduced: it is pending along them.
    pub(super) fn is_pending_along(&self, axes: &[usize]) -> bool {
        self.pending.as_ref().is_some_and(|pending| axes.iter().all(|axis| pending.axes.contains(axis)))
    }

    /// The leaf, or what was computed from it, that gradients arrive in.
    pub(crate) fn source(&self) -> &Tensor {
        self.pending.as_ref().map_or(&self.local, |pending| &pending.raw)
    }

    /// The layout of what arrives there.
    pub(super) fn source_layout(&self) -> Layout {
        match &self.pending {
            Some(UnreducedGrad { axes, .. }) => self.layout.contributions(axes),
            None => self.layout.without_partial(),
        }
    }
}

/// Returns the number of ranks along these axes that continue in the same way with each shard.
fn copies(layout: &Layout, axes: &[usize]) -> usize {
    let sharding = layout.sharding_axes();
    axes.iter().filter(|axis| !sharding.contains(axis)).map(|&axis| layout.mesh_shape()[axis]).product()
}

/// `x`, of whose gradient each of so many ranks brings the same share.
fn shared_out(x: &Tensor, ranks: usize) -> Result<Tensor> {
    if ranks == 1 || !x.requires_grad() || !is_grad_enabled() {
        return Ok(x.shallow_clone());
    }
    Ok(attach(Arc::new(Copies(ranks)), x, x.detach())?)
}

/// From a value to its copies on so many ranks, all of which are used alike: the adjoint takes the mean of gradients that are
/// equal, a share from each.
struct Copies(usize);

impl LinearMap for Copies {
    fn name(&self) -> &'static str {
        "copies"
    }

    fn forward(&self, x: &Tensor) -> isobar_collectives::Result<Tensor> {
        Ok(x.shallow_clone())
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(Share(self.0))
    }
}

/// Of a value that so many ranks have, the share of each.
struct Share(usize);

impl LinearMap for Share {
    fn name(&self) -> &'static str {
        "share"
    }

    fn forward(&self, x: &Tensor) -> isobar_collectives::Result<Tensor> {
        let share = x.f_mul_scalar((self.0 as f64).recip());
        share.map_err(|error| isobar_collectives::Error::Torch(error.to_string()))
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(Self(self.0))
    }
}
