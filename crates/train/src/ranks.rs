//! The ranks of a run: which share samples, and over which gradients are summed.

use isobar_collectives::Group;
use isobar_manager::DeviceMesh;

use crate::error::{Error, Result};
use crate::fields::{DATA_AXIS, MODEL_AXIS};
use crate::fully_sharded::ShardedParameters;

/// The ranks of a run. [`fit`](crate::fit) compares them with the parameters and the fields, and rejects combinations
/// whose gradients would be wrong.
#[derive(Debug, Clone)]
pub struct Ranks {
    /// All of them.
    pub world: Group,
    /// Those that share the samples of a batch among them: each takes its part, with the same part of the model. A rank alone
    /// where a task's own arrays are split over ranks; each then gives the task all samples.
    pub data: Group,
    /// Those whose gradients add up to that of the loss.
    pub gradients: Group,
    /// Supplier and mesh of parameters that are sharded over an axis `shard`.
    pub shards: Option<(ShardedParameters, DeviceMesh)>,
}

impl Ranks {
    /// Data parallelism over all ranks.
    pub fn data_parallel(world: &Group) -> Self {
        Self { world: world.clone(), data: world.clone(), gradients: world.clone(), shards: None }
    }

    /// Fields split over a mesh of all ranks, as [`ShardedFields`](crate::ShardedFields) lays them out, and parameters whose
    /// gradients are left [pending](isobar_shard::MeshParams::pending) on it: along all of its axes but [`MODEL_AXIS`]. Does
    /// not communicate.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh.
    pub fn sharded(world: &Group, mesh: &DeviceMesh) -> Result<Self> {
        let names = mesh.names();
        let axes: Vec<usize> = (0..mesh.ndim()).filter(|&axis| names[axis] != MODEL_AXIS).collect();
        if axes.is_empty() {
            let found = format!("of the axis \"{MODEL_AXIS}\" alone");
            let expected = format!(
                "a further axis, over which gradients are summed: for example the shape [1, -1] with the names \
                 [\"{DATA_AXIS}\", \"{MODEL_AXIS}\"]"
            );
            return Err(Error::invalid(mesh.to_string(), found, expected));
        }
        let gradients = mesh.group_along(&axes).map_err(isobar_shard::Error::from)?;
        Ok(Self { world: world.clone(), data: Group::single(), gradients, shards: None })
    }

    /// Trains with parameters, gradients and optimizer state sharded over the axis `shard` of the mesh: see
    /// [`FullySharded`](crate::FullySharded). The model must be built with `sharded`.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh.
    pub fn fully_sharded(world: &Group, mesh: &DeviceMesh, sharded: &ShardedParameters) -> Result<Self> {
        Ok(Self { shards: Some((sharded.clone(), mesh.clone())), ..Self::sharded(world, mesh)? })
    }
}
