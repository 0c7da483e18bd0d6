//! Tensors whose gradients are left pending: each rank's is its contribution, and nobody has added them up yet.

use std::sync::Arc;

use isobar_collectives::{LinearMap, attach};
use isobar_torch::guard::is_grad_enabled;
use tch::{TchError, Tensor};

use super::ShardTensor;
use crate::error::Result;
use crate::layout::Layout;
use crate::ops::torch;

impl ShardTensor {
    /// The part `raw` of a tensor that is not partial. Gradients arrive in `raw` as contributions, to be summed over all ranks
    /// of the mesh: the operators that use it for a computation of each rank's own bring theirs without communication.
    /// Elsewhere every rank computes the whole gradient of its part, and brings a share of it.
    pub(crate) fn contributed(raw: Tensor, layout: Layout) -> Result<Self> {
        if !raw.requires_grad() || !is_grad_enabled() {
            return Ok(Self::new(raw, layout));
        }
        let local = shared_out(&raw, copies(&layout, &[]))?;
        Ok(Self { local, layout, pending: Some(raw) })
    }

    /// The tensor of that layout whose parts `f` computes from the parts: a linear function without communication, such as a
    /// view. A pending gradient stays pending.
    pub(crate) fn viewed(
        &self,
        op: &'static str,
        layout: Layout,
        f: impl Fn(&Tensor) -> Result<Tensor, TchError>,
    ) -> Result<Self> {
        match &self.pending {
            Some(raw) => Self::contributed(torch(op, f(raw))?, layout),
            None => Ok(Self::new(torch(op, f(&self.local))?, layout)),
        }
    }

    /// The tensor of that layout whose parts `f` joins from those of several, all sharded along its axes.
    pub(crate) fn joined(
        op: &'static str,
        tensors: &[Self],
        layout: Layout,
        f: impl Fn(&[&Tensor]) -> Result<Tensor, TchError>,
    ) -> Result<Self> {
        let pending: Option<Vec<&Tensor>> = tensors.iter().map(|tensor| tensor.pending.as_ref()).collect();
        match pending {
            Some(raw) => Self::contributed(torch(op, f(&raw))?, layout),
            None => {
                let locals: Vec<&Tensor> = tensors.iter().map(|tensor| &tensor.local).collect();
                Ok(Self::new(torch(op, f(&locals))?, layout))
            }
        }
    }

    /// What [`per_rank`](Self::per_rank) gives where the gradient is pending.
    pub(super) fn contribution(&self, axes: &[usize]) -> Result<Option<Tensor>> {
        self.pending.as_ref().map(|raw| shared_out(raw, copies(&self.layout, axes))).transpose()
    }

    /// The leaf, or what was computed from it, that gradients arrive in.
    pub(super) fn source(&self) -> &Tensor {
        self.pending.as_ref().unwrap_or(&self.local)
    }

    /// The layout of what arrives there.
    pub(super) fn source_layout(&self) -> Layout {
        match self.pending {
            Some(_) => self.layout.contributions(),
            None => self.layout.of_gradient(),
        }
    }
}

/// How many ranks go on in the same way with each part, where those along `axes` do not.
fn copies(layout: &Layout, axes: &[usize]) -> usize {
    let sharding = layout.sharding_axes();
    let ranks = layout.mesh_shape().iter().enumerate();
    ranks
        .filter(|(axis, _)| !axes.contains(axis) && !sharding.contains(axis))
        .map(|(_, ranks)| ranks)
        .product()
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
