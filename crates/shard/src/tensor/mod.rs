//! The distributed tensor.
//!
//! Redistribution and gradients are here; operators are not, and nothing here depends on them.

mod contribution;
mod cost;
mod gradient;
mod make;
mod mesh;
mod partial;
mod redistribute;
mod show;
mod watch;

use contribution::UnreducedGrad;
pub(crate) use cost::received;
pub use gradient::grad;
pub(crate) use mesh::same_mesh;
use redistribute::reduction;
pub use redistribute::{Pending, Redistribute};
use tch::{Device, Kind, Tensor};
pub use watch::ParameterWatch;
pub(crate) use watch::{Use, Watched};

use isobar_mesh::DeviceMesh;

use crate::error::{Error, Result};
use crate::layout::{Layout, Placement};

/// A global tensor of which each rank of a mesh has a part.
///
/// All ranks of the mesh call the same operators in the same order, as they do collectives; the values are those of the
/// global tensor, on every layout. Its gradient is laid out as it is: sharded where it is sharded, whole and the same on all
/// ranks where it is replicated, where a replicated value counts once.
///
/// ```
/// use isobar_collectives::threads;
/// use isobar_mesh::DeviceMesh;
/// use isobar_array::Elementwise;
/// use isobar_shard::{Placement, ShardTensor};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
///     let whole = Tensor::arange(6, (Kind::Double, Device::Cpu)).view([3, 2]);
///     let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap();
///     assert_eq!(x.local_shape()[0], [2, 1][group.rank()]);
///     let y = x.mul_scalar(2.0).unwrap();
///     assert_eq!(y.full_tensor(None).unwrap(), whole * 2.0);
/// });
/// ```
pub struct ShardTensor {
    local: Tensor,
    layout: Layout,
    /// Of a gradient that is left pending: what it arrives in.
    pending: Option<UnreducedGrad>,
    /// Of a parameter whose values are not always there, or a view of one.
    watched: Option<Watched>,
}

impl ShardTensor {
    /// The parts of the same layout as another tensor's, which is known to fit.
    pub(crate) fn new(local: Tensor, layout: Layout) -> Self {
        Self { local, layout, pending: None, watched: None }
    }

    /// A tensor that shares this one's memory and history.
    #[must_use]
    pub fn shallow_clone(&self) -> Self {
        let pending = self.pending.as_ref().map(UnreducedGrad::shallow_clone);
        let watched = self.watched.clone();
        Self { local: self.local.shallow_clone(), layout: self.layout.clone(), pending, watched }
    }

    /// Whose parameter it is a view of, where somebody watches these.
    pub(crate) fn watched(&self) -> Option<&Watched> {
        self.watched.as_ref()
    }

    pub(crate) fn watch(&mut self, watched: Watched) {
        self.watched = Some(watched);
    }

    /// This rank's part, as it lies in memory: not reduced where the tensor is partial. The gradient of what is computed from
    /// it is taken as [`to_local`](Self::to_local) without placements takes it.
    pub fn local(&self) -> &Tensor {
        &self.local
    }

    /// Returns the layout: the shard of each rank.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The global shape.
    pub fn shape(&self) -> &[i64] {
        self.layout.shape()
    }

    /// The shape of this rank's part.
    pub fn local_shape(&self) -> &[i64] {
        self.layout.local_shape()
    }

    /// Returns the placement along each axis of the mesh.
    pub fn placements(&self) -> &[Placement] {
        self.layout.placements()
    }

    /// The mesh.
    pub fn device_mesh(&self) -> &DeviceMesh {
        self.layout.mesh()
    }

    /// Number of dims.
    pub fn ndim(&self) -> usize {
        self.layout.ndim()
    }

    /// Kind of the elements.
    pub fn kind(&self) -> Kind {
        self.local.kind()
    }

    /// Returns the device of this rank's elements.
    pub fn device(&self) -> Device {
        self.local.device()
    }

    /// Returns the offsets of the ranks' shards along the dim that the axis shards; see [`Layout::offsets`].
    ///
    /// # Errors
    ///
    /// No such axis.
    pub fn offsets(&self, axis: usize) -> Result<Vec<i64>> {
        self.layout.offsets(axis)
    }

    /// This rank's part.
    ///
    /// `grad_placements` say what the ranks' gradients of it are: the tensor's own placements where not given, with partial
    /// read as replicated. Where ranks go on differently from a replicated part, its gradient is `Partial(Sum)`: they are
    /// added up then.
    ///
    /// Does not communicate; backward does where partial gradients are added up, and all ranks call it then.
    ///
    /// # Errors
    ///
    /// Gradient placements that are neither the tensor's own nor `Partial(Sum)` where it is replicated.
    pub fn to_local(&self, grad_placements: Option<&[Placement]>) -> Result<Tensor> {
        let watched = Use::enter(&[self])?;
        let part = self.part_with(grad_placements)?;
        match watched {
            None => Ok(part),
            // The result must stay valid when the parameter's values are freed.
            Some(_) => crate::dense::named("to_local", &[], part.f_mul_scalar(1.0)),
        }
    }

    fn part_with(&self, grad_placements: Option<&[Placement]>) -> Result<Tensor> {
        let Some(placements) = grad_placements else { return Ok(self.local.shallow_clone()) };
        let mut partial = Vec::new();
        let own = self.layout.without_partial();
        for (axis, (given, own)) in placements.iter().zip(own.placements()).enumerate() {
            match (given, own) {
                (Placement::Partial(isobar_collectives::ReduceOp::Sum), Placement::Replicate) => {
                    partial.push(axis)
                }
                (given, own) if given == own => {}
                _ => return Err(self.gradient_placement(axis, *given)),
            }
        }
        if placements.len() != own.placements().len() {
            return Err(self.gradient_placement(placements.len(), Placement::Replicate));
        }
        self.mark_varying(&partial)
    }

    /// The whole, on every rank: [`redistribute`](Self::redistribute)d to replicated. `grad_placements` as for
    /// [`to_local`](Self::to_local).
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Those of the exchange; gradient placements that do not fit.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::Tensor;
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let whole = Tensor::from_slice(&[1.0, 2.0, 3.0]);
    ///     let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap();
    ///     assert_eq!(x.full_tensor(None).unwrap(), whole);
    /// });
    /// ```
    pub fn full_tensor(&self, grad_placements: Option<&[Placement]>) -> Result<Tensor> {
        self.to_layout(&self.layout.replicated())?.to_local(grad_placements)
    }

    fn gradient_placement(&self, axis: usize, given: Placement) -> Error {
        Error::from(isobar_array::Error::Argument {
            op: "to_local",
            reason: format!(
                "gradients cannot be {given} along axis {axis} of a tensor {}; expected its own placements, or \
                 Partial(sum) where it is replicated",
                self.layout
            ),
        })
    }
}
