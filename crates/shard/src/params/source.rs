//! Content of a parameter's gradient after backward, and the ranks over which it must still be summed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use isobar_collectives::Group;
use isobar_mesh::DeviceMesh;

use super::ParameterWatch;
use crate::error::{Error, Result};

/// Content of a parameter's gradient after backward: the gradient of this rank's own loss, the complete
/// gradient of a loss that the ranks of a mesh compute together, or this rank's contribution to it.
///
/// [`ParamStore`](super::ParamStore) records local gradients, [`MeshParams`](super::MeshParams) summed or
/// pending ones. Training compares this with the ranks over which it sums gradients, and rejects combinations
/// that would give a wrong gradient.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_array::Generator;
/// use isobar_shard::{Init, MeshParams, ParamStore, Params, Placement};
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let mut store = ParamStore::new(Generator::new(1));
/// let mut params = MeshParams::new(&mut store, &mesh).pending();
/// params.param("weight", &[3], Init::Constant(1.0), Placement::Replicate)?;
/// assert!(store.parameters()[0].gradient.is_pending());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct GradientSource {
    /// The ranks of a store's region, which compute a loss together.
    region: Option<Group>,
    /// The mesh whose ranks compute a loss together.
    mesh: Option<DeviceMesh>,
    pending: bool,
    /// The axis of the mesh along which the parameter is split.
    along: Option<usize>,
    /// Further axes over which the model's declaration splits the parameter.
    split: Vec<usize>,
    watch: Option<Arc<dyn ParameterWatch>>,
}

impl GradientSource {
    /// The gradient of this rank's own loss.
    pub fn local() -> Self {
        Self::default()
    }

    /// The gradient of a loss that the ranks of a region compute together, each with its shard of the model.
    pub(crate) fn in_region(region: &Group) -> Self {
        Self { region: Some(region.clone()), ..Self::default() }
    }

    /// The complete gradient of a loss that all ranks of the mesh compute together: backward has summed it.
    pub fn summed(mesh: &DeviceMesh) -> Self {
        Self { mesh: Some(mesh.clone()), ..Self::default() }
    }

    /// This rank's contribution to the gradient of a loss that all ranks of the mesh compute together. The gradient is the sum of
    /// the contributions of all of them.
    pub fn pending(mesh: &DeviceMesh) -> Self {
        Self { pending: true, ..Self::summed(mesh) }
    }

    /// Marks the parameter as sharded along an axis of the mesh, over whose ranks gradients are not summed.
    ///
    /// # Errors
    ///
    /// An axis that the mesh lacks; a gradient that is local.
    pub fn along(self, axis: &str) -> Result<Self> {
        let names = self.mesh.as_ref().map(DeviceMesh::names).unwrap_or_default();
        match names.iter().position(|name| *name == axis) {
            Some(along) => Ok(Self { along: Some(along), ..self }),
            None => Err(Error::from(isobar_array::Error::Argument {
                op: "along",
                reason: format!(
                    "there is no axis \"{axis}\" among {names:?}, the axes of the gradient's mesh"
                ),
            })),
        }
    }

    pub(super) fn along_axis(self, along: Option<usize>) -> Self {
        Self { along, ..self }
    }

    pub(super) fn num_shards(self, split: Vec<usize>) -> Self {
        Self { split, ..self }
    }

    /// Returns whether a declaration splits the parameter over axes of the mesh. Other parameters of the model may be
    /// replicated along these: each is then summed over ranks of its own.
    pub fn is_split(&self) -> bool {
        !self.split.is_empty()
    }

    pub(super) fn watched(self, watch: Option<Arc<dyn ParameterWatch>>) -> Self {
        Self { watch, ..self }
    }

    /// The mesh whose ranks compute a loss together; `None` where each rank, or each region of ranks, computes its own.
    pub fn mesh(&self) -> Option<&DeviceMesh> {
        self.mesh.as_ref()
    }

    /// The name of the axis along which the parameter is split.
    pub fn along_name(&self) -> Option<&str> {
        self.mesh.as_ref()?.names().get(self.along?).copied()
    }

    /// Returns whether the gradient is a contribution that is still to be summed over ranks.
    pub fn is_pending(&self) -> bool {
        self.pending
    }

    /// Returns the watch on the parameter, if there is one.
    pub fn watch(&self) -> Option<&Arc<dyn ParameterWatch>> {
        self.watch.as_ref()
    }

    /// The world ranks that compute a loss together; empty if each rank computes its own.
    pub fn together(&self) -> Vec<usize> {
        match (&self.mesh, &self.region) {
            (Some(mesh), _) => mesh.ranks(),
            (None, Some(region)) => region.ranks().to_vec(),
            (None, None) => Vec::new(),
        }
    }

    fn sharding_axes(&self) -> Vec<usize> {
        self.along.iter().chain(&self.split).copied().collect()
    }

    /// The ranks that hold the same shard of the parameter as this one: those along all axes of the mesh
    /// except the one along which it is split. A pending gradient must be summed over them. `None` without a
    /// mesh, or if it has no other axis. Does not communicate.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh.
    pub fn copies(&self) -> Result<Option<Group>> {
        let Some(mesh) = &self.mesh else { return Ok(None) };
        let axes: Vec<usize> = (0..mesh.ndim()).filter(|axis| !self.sharding_axes().contains(axis)).collect();
        match axes.is_empty() {
            true => Ok(None),
            false => Ok(Some(mesh.group_along(&axes)?)),
        }
    }
}

/// State of a gradient since backward: a number that training stores with a parameter, shared by all handles
/// to it. Initially 0.
#[derive(Debug, Clone, Default)]
pub struct GradientState(Arc<AtomicU8>);

impl GradientState {
    /// Returns the number.
    pub fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces the number.
    pub fn set(&self, state: u8) {
        self.0.store(state, Ordering::Relaxed);
    }

    /// Replaces the number if it is `from`.
    pub fn change(&self, from: u8, to: u8) {
        let _ = self.0.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl fmt::Display for GradientSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.mesh, self.pending) {
            (None, _) => write!(f, "local to a rank"),
            (Some(mesh), false) => write!(f, "summed over {mesh}"),
            (Some(mesh), true) => write!(f, "pending on {mesh}"),
        }?;
        let (Some(mesh), [first, others @ ..]) = (&self.mesh, &self.sharding_axes()[..]) else {
            return Ok(());
        };
        write!(f, " along all axes but \"{}\"", mesh.names()[*first])?;
        others.iter().try_for_each(|axis| write!(f, " and \"{}\"", mesh.names()[*axis]))
    }
}

impl fmt::Debug for GradientSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let watched = if self.watch.is_some() { ", watched" } else { "" };
        write!(f, "GradientSource({self} of ranks {:?}{watched})", self.together())
    }
}
