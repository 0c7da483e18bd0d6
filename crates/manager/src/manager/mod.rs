//! This process's place among all ranks.
//!
//! It puts launch, configuration, groups and mesh together, and knows nothing of tensors.

mod exit;
mod life;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use isobar_collectives::{BackendKind, Group, nccl};
use isobar_launch::Method;
use tch::Device;

use crate::watchdog::Watchdog;
use crate::{DeviceMesh, Result};
use isobar_mesh::NamedGroups;
use isobar_mesh::ProcessGroupConfig;

pub use life::{SetupOptions, ThreadBinding};

/// Rank, device, groups and mesh of this process; or of this thread, where ranks are threads.
///
/// Set up once by [`DistributedManager::initialize`] or [`DistributedManager::setup`], and reached from anywhere by
/// [`DistributedManager::get`]. A clone is the same manager.
///
/// Methods that make groups or meshes communicate: all ranks call them, in the same order and with the same arguments,
/// which is checked. All others are local.
#[derive(Clone)]
pub struct DistributedManager(Arc<State>);

struct State {
    world: Group,
    method: Method,
    local_rank: usize,
    device: Device,
    /// True if groups have NCCL for CUDA tensors.
    nccl: bool,
    broadcast_buffers: AtomicBool,
    find_unused_parameters: AtomicBool,
    groups: Mutex<NamedGroups>,
    mesh: Mutex<Option<DeviceMesh>>,
    /// Watchdog, if there are other processes.
    watchdog: Option<Watchdog>,
}

impl DistributedManager {
    /// This rank in the world, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.world.rank()
    }

    /// This rank among those of its host, from 0.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.0.local_rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.0.world.size()
    }

    /// The device of this rank: a GPU by local rank where there is one, else the CPU. Ranks that are threads have the
    /// CPU.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Returns whether there are other ranks.
    #[must_use]
    pub fn distributed(&self) -> bool {
        self.world_size() > 1
    }

    /// Returns whether the device is a GPU.
    #[must_use]
    pub fn cuda(&self) -> bool {
        self.0.device.is_cuda()
    }

    /// Backend that carries host memory between ranks.
    #[must_use]
    pub fn backend(&self) -> BackendKind {
        self.0.world.backend()
    }

    /// Returns whether CUDA tensors go over NCCL, and not through host memory.
    #[must_use]
    pub fn nccl(&self) -> bool {
        self.0.nccl
    }

    /// Returns the method by which this process found its rank.
    #[must_use]
    pub fn method(&self) -> Method {
        self.0.method
    }

    /// Returns whether data parallel sends rank 0's buffers to all ranks before each forward pass. `isobar train` and
    /// `isobar_train::Trainer` read it when they make the training loop; a loop of your own passes it on to
    /// `isobar_train::DataParallelConfig`. PhysicsNeMo's manager only stores it, too.
    #[must_use]
    pub fn broadcast_buffers(&self) -> bool {
        self.0.broadcast_buffers.load(Ordering::Relaxed)
    }

    /// Sets [`Self::broadcast_buffers`], on this rank: all ranks set the same, before training starts.
    pub fn set_broadcast_buffers(&self, on: bool) {
        self.0.broadcast_buffers.store(on, Ordering::Relaxed);
    }

    /// Returns whether data parallel accepts parameters that a forward pass did not use. As
    /// [`Self::broadcast_buffers`], the manager stores it for `isobar train`, `isobar_train::Trainer` and loops of your own.
    #[must_use]
    pub fn find_unused_parameters(&self) -> bool {
        self.0.find_unused_parameters.load(Ordering::Relaxed)
    }

    /// Sets [`Self::find_unused_parameters`], on this rank: all ranks set the same, before training starts.
    pub fn set_find_unused_parameters(&self, on: bool) {
        self.0.find_unused_parameters.store(on, Ordering::Relaxed);
    }

    /// Returns whether no other rank is known to be lost or to have ended with an error. Always true for a single rank, for
    /// thread ranks, and if `distributed.watchdog` is off. Does not communicate.
    #[must_use]
    pub fn peers_alive(&self) -> bool {
        self.0.watchdog.as_ref().is_none_or(Watchdog::peers_alive)
    }

    /// Returns whether ranks watch each other.
    #[must_use]
    pub fn watched(&self) -> bool {
        self.0.watchdog.is_some()
    }

    /// Sets the folder in which this rank writes its flight record when a rank is lost. Does not communicate.
    pub fn set_flight_dir(&self, folder: impl Into<PathBuf>) {
        if let Some(watchdog) = &self.0.watchdog {
            watchdog.set_folder(folder.into());
        }
    }

    /// The group of a name; the world for none.
    ///
    /// # Errors
    ///
    /// [`UndefinedGroup`](isobar_mesh::Error::UndefinedGroup) for a name that no group has.
    pub fn group(&self, name: Option<&str>) -> Result<Group> {
        match name {
            Some(name) => Ok(self.groups().get(name)?),
            None => Ok(self.0.world.clone()),
        }
    }

    /// The names of all groups that were made, in alphabetical order; the world has none.
    #[must_use]
    pub fn group_names(&self) -> Vec<String> {
        self.groups().names()
    }

    /// The number of ranks in a group; in the world for none.
    ///
    /// # Errors
    ///
    /// [`UndefinedGroup`](isobar_mesh::Error::UndefinedGroup) for a name that no group has.
    pub fn group_size(&self, name: Option<&str>) -> Result<usize> {
        self.group(name).map(|group| group.size())
    }

    /// This rank in a group; in the world for none.
    ///
    /// # Errors
    ///
    /// [`UndefinedGroup`](isobar_mesh::Error::UndefinedGroup) for a name that no group has.
    pub fn group_rank(&self, name: Option<&str>) -> Result<usize> {
        self.group(name).map(|group| group.rank())
    }

    /// The name of a group that this manager made; none for the world and for other groups.
    #[must_use]
    pub fn group_name(&self, group: &Group) -> Option<String> {
        self.groups().name_of(group).map(str::to_owned)
    }

    /// Cuts the world, or every instance of a group, into groups of `size` consecutive members, and returns the one
    /// that holds this rank. `verbose` logs the ranks of all of them.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A name that is taken, an unknown parent, a size that does not divide the parent's; ranks that do not
    /// agree; a failed exchange.
    pub fn create_process_subgroup(
        &self,
        name: &str,
        size: i64,
        parent: Option<&str>,
        verbose: bool,
    ) -> Result<Group> {
        let mut groups = self.groups();
        let group = groups.cut(&self.0.world, name, size, parent)?;
        self.equip(&group)?;
        self.report(&groups, name, verbose)?;
        Ok(group)
    }

    /// Makes the groups of ranks that have the same place in their instances of `group_name`, and returns the one that
    /// holds this rank. `verbose` logs the ranks of all of them.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A name that is taken, an unknown parent group; ranks that do not agree; a failed exchange.
    pub fn create_orthogonal_process_group(
        &self,
        orthogonal_group_name: &str,
        group_name: &str,
        verbose: bool,
    ) -> Result<Group> {
        let mut groups = self.groups();
        let group = groups.cross(&self.0.world, orthogonal_group_name, group_name)?;
        self.equip(&group)?;
        self.report(&groups, orthogonal_group_name, verbose)?;
        Ok(group)
    }

    /// Makes every group of a tree: the root is cut from the world, and the groups below one another are orthogonal,
    /// the first with consecutive ranks, the following ones strided. As in PhysicsNeMo, the group orthogonal to `x` is
    /// kept under the name `__orthogonal_to_x`.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A tree that does not hold together; whatever [`Self::create_process_subgroup`] refuses.
    pub fn create_groups_from_config(&self, config: &ProcessGroupConfig, verbose: bool) -> Result<()> {
        let config = config.resolve(self.world_size())?;
        let root = config.root();
        self.create_process_subgroup(&root.name, root.size.unwrap_or(1), None, verbose)?;
        let mut pending = vec![root.name.clone()];
        while !pending.is_empty() {
            let mut next = Vec::new();
            for name in pending {
                let mut parent = name.clone();
                for child in config.children(&name)? {
                    self.create_process_subgroup(
                        &child.name,
                        child.size.unwrap_or(1),
                        Some(&parent),
                        verbose,
                    )?;
                    parent = format!("__orthogonal_to_{}", child.name);
                    self.create_orthogonal_process_group(&parent, &child.name, verbose)?;
                    next.push(child.name.clone());
                }
            }
            pending = next;
        }
        Ok(())
    }

    /// Arranges all ranks along named axes, the last axis fastest; one extent may be -1 and is derived. The mesh takes
    /// the place of an earlier one.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// See [`DeviceMesh::new`].
    pub fn initialize_mesh(&self, shape: &[i64], names: &[&str]) -> Result<DeviceMesh> {
        let mesh = DeviceMesh::new(&self.0.world, shape, names)?;
        for name in names {
            self.equip(&mesh.group(name)?)?;
        }
        *self.lock_mesh() = Some(mesh.clone());
        Ok(mesh)
    }

    /// The mesh of all ranks: the one of [`Self::initialize_mesh`], else one with the single axis `world`. Does not
    /// communicate.
    #[must_use]
    pub fn global_mesh(&self) -> DeviceMesh {
        self.lock_mesh().get_or_insert_with(|| DeviceMesh::world(&self.0.world)).clone()
    }

    /// The mesh along one axis that holds this rank; the whole mesh for none.
    ///
    /// # Errors
    ///
    /// An axis that the mesh does not have.
    pub fn mesh(&self, name: Option<&str>) -> Result<DeviceMesh> {
        match name {
            Some(name) => Ok(self.global_mesh().slice(&[name])?),
            None => Ok(self.global_mesh()),
        }
    }

    /// Name and extent of each axis of the mesh.
    #[must_use]
    pub fn mesh_dims(&self) -> Vec<(String, usize)> {
        let mesh = self.global_mesh();
        mesh.names().into_iter().map(str::to_owned).zip(mesh.shape()).collect()
    }

    /// The group of all ranks of a mesh or of a slice of it, in the mesh's order. The groups of several axes are made
    /// on the first call and kept.
    ///
    /// All ranks that made the mesh call.
    ///
    /// # Errors
    ///
    /// A rank outside the mesh; ranks that do not agree; a failed exchange.
    pub fn get_mesh_group(&self, mesh: &DeviceMesh) -> Result<Group> {
        let name = mesh.names().join("_");
        let group = mesh.flatten(&name)?.group(&name)?;
        self.equip(&group)?;
        Ok(group)
    }

    /// Gives a new group NCCL where the world has it; its ranks call.
    fn equip(&self, group: &Group) -> Result<()> {
        match self.0.device {
            Device::Cuda(index) if self.0.nccl => Ok(nccl::attach(group, index)?),
            _ => Ok(()),
        }
    }

    fn groups(&self) -> MutexGuard<'_, NamedGroups> {
        self.0.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_mesh(&self) -> MutexGuard<'_, Option<DeviceMesh>> {
        self.0.mesh.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, groups: &NamedGroups, name: &str, verbose: bool) -> Result<()> {
        if verbose && self.rank() == 0 {
            tracing::info!("group \"{name}\": ranks {:?}", groups.instances(name)?);
        }
        Ok(())
    }
}

impl fmt::Display for DistributedManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = match self.device() {
            Device::Cuda(index) => format!("cuda:{index}"),
            _ => "cpu".to_owned(),
        };
        write!(
            f,
            "rank {} of {}, local rank {}, on {device}, over {}{}, started by {}",
            self.rank(),
            self.world_size(),
            self.local_rank(),
            self.backend(),
            if self.nccl() { " and nccl" } else { "" },
            self.method()
        )
    }
}

impl fmt::Debug for DistributedManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DistributedManager ({self})")
    }
}
