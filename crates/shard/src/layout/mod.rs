//! Layouts: which indices of a global tensor each rank of a mesh has.
//!
//! A layout depends on no tensor and does not communicate: all ranks compute the same one.

mod parts;
mod placement;
mod sizes;

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};

use isobar_collectives::{Group, ReduceOp};
use isobar_mesh::DeviceMesh;

pub use parts::Interval;
pub(crate) use parts::{Dim, join, length};
pub use placement::Placement;
pub use sizes::Sizes;

use crate::error::{Error, Result};

/// Layout of a global tensor over a mesh: a placement for each axis, and the indices of every rank.
///
/// A layout is the same on all ranks. A clone is the same layout, and costs nothing.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::{Layout, Placement, Sizes};
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[10, 3], &Sizes::Balanced)?;
/// assert_eq!(layout.local_shape(), [10, 3]);
/// assert_eq!(layout.to_string(), "[10, 3] on mesh (domain=1): domain Shard(0) of [10]");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Layout(Arc<Inner>);

struct Inner {
    mesh: DeviceMesh,
    mesh_shape: Vec<usize>,
    /// None outside the mesh.
    coordinates: Option<Vec<usize>>,
    placements: Vec<Placement>,
    shape: Vec<i64>,
    dims: Vec<Dim>,
    local_shape: Vec<i64>,
    digest: u64,
    ranks: OnceLock<Ranks>,
}

/// The ranks of a mesh as a group, and their places in it where these are not those of the mesh.
#[derive(Clone)]
pub(crate) struct Ranks {
    pub(crate) group: Group,
    pub(crate) places: Option<Vec<usize>>,
    /// The groups along single axes, where the mesh has several.
    axes: Vec<Group>,
}

impl Ranks {
    /// All groups that carry a tensor of the layout.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &Group> {
        std::iter::once(&self.group).chain(&self.axes)
    }
}

impl Layout {
    /// The layout of a tensor of `shape`, with a placement for each axis of the mesh.
    ///
    /// Does not communicate.
    ///
    /// # Errors
    ///
    /// Placements that are not one for each axis, dims that do not exist, explicit sizes that are not one for each part or do
    /// not add up to the extent; [`Sizes::Infer`], which needs local tensors.
    pub fn new(mesh: &DeviceMesh, placements: &[Placement], shape: &[i64], sizes: &Sizes) -> Result<Self> {
        let refuse = |problem: String| Error::Layout {
            mesh: mesh.to_string(),
            placements: listed(placements),
            shape: shape.to_vec(),
            problem,
        };
        let mesh_shape = mesh.shape();
        if placements.len() != mesh_shape.len() {
            return Err(refuse(format!("expected a placement for each of {} axes", mesh_shape.len())));
        }
        if shape.iter().any(|&extent| extent < 0) {
            return Err(refuse("an extent is negative".into()));
        }
        if *sizes == Sizes::Infer {
            return Err(refuse("sizes are inferred from local tensors only, by from_local".into()));
        }
        let mut dims: Vec<Dim> = shape.iter().map(|&extent| Dim::whole(extent)).collect();
        for (axis, placement) in placements.iter().enumerate() {
            let (dim, factor) = match *placement {
                Placement::Shard(dim) => (dim, 1),
                Placement::StridedShard { dim, split_factor } => (dim, split_factor),
                Placement::Replicate | Placement::Partial(_) => continue,
            };
            if dim >= shape.len() {
                return Err(refuse(format!("there is no dim {dim}")));
            }
            if factor == 0 {
                return Err(refuse("a split factor is 0; expected at least 1".into()));
            }
            let whole = std::mem::replace(&mut dims[dim], Dim::whole(0));
            dims[dim] = whole.split(axis, mesh_shape[axis], sizes, factor);
        }
        if let Sizes::Explicit(tables) = sizes {
            for (index, (dim, table)) in tables.iter().enumerate() {
                if tables[..index].iter().any(|(other, _)| other == dim) {
                    return Err(refuse(format!(
                        "sizes are given twice for dim {dim}; expected one table a dim"
                    )));
                }
                let Some(split) = dims.get_mut(*dim) else {
                    return Err(refuse(format!("sizes are given for dim {dim}, which does not exist")));
                };
                let strided = placements
                    .iter()
                    .any(|p| matches!(p, Placement::StridedShard { dim: of, .. } if of == dim));
                if strided {
                    return Err(refuse(format!(
                        "sizes are given for dim {dim}, which is a StridedShard; these follow torch.chunk"
                    )));
                }
                if table.len() != split.parts.len() {
                    return Err(refuse(format!(
                        "{} sizes are given for dim {dim}; expected one for each of {} parts",
                        table.len(),
                        split.parts.len()
                    )));
                }
                if table.iter().any(|&size| size < 0) || table.iter().sum::<i64>() != shape[*dim] {
                    return Err(refuse(format!(
                        "the sizes {table:?} of dim {dim} do not add up to its extent {}",
                        shape[*dim]
                    )));
                }
                *split = Dim::consecutive(split.axes.clone(), table);
            }
        }
        Ok(Self::from_dims(mesh, placements.to_vec(), dims))
    }

    /// The layout with these dims, which fit the placements.
    pub(crate) fn from_dims(mesh: &DeviceMesh, placements: Vec<Placement>, dims: Vec<Dim>) -> Self {
        Self::build(mesh, mesh.shape(), mesh.coordinates(), placements, dims)
    }

    /// A layout on the same mesh.
    pub(crate) fn with_placements(&self, placements: Vec<Placement>, dims: Vec<Dim>) -> Self {
        let inner = &*self.0;
        Self::build(&inner.mesh, inner.mesh_shape.clone(), inner.coordinates.clone(), placements, dims)
    }

    fn build(
        mesh: &DeviceMesh,
        mesh_shape: Vec<usize>,
        coordinates: Option<Vec<usize>>,
        placements: Vec<Placement>,
        dims: Vec<Dim>,
    ) -> Self {
        let local_shape = match &coordinates {
            Some(at) => dims.iter().map(|dim| length(dim.part(at, &mesh_shape))).collect(),
            None => vec![0; dims.len()],
        };
        let mut hasher = DefaultHasher::new();
        (&mesh_shape, &placements, &dims).hash(&mut hasher);
        Self(Arc::new(Inner {
            mesh: mesh.clone(),
            coordinates,
            shape: dims.iter().map(Dim::extent).collect(),
            placements,
            dims,
            local_shape,
            digest: hasher.finish(),
            mesh_shape,
            ranks: OnceLock::new(),
        }))
    }

    /// The ranks.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.0.mesh
    }

    /// Returns the placement along each axis.
    pub fn placements(&self) -> &[Placement] {
        &self.0.placements
    }

    /// The global shape.
    pub fn shape(&self) -> &[i64] {
        &self.0.shape
    }

    /// The number of dims.
    pub fn ndim(&self) -> usize {
        self.0.dims.len()
    }

    /// The shape of this rank's part; all zeros outside the mesh.
    pub fn local_shape(&self) -> &[i64] {
        &self.0.local_shape
    }

    /// The shape of the part of the mesh's rank `index`, the last axis fastest.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, Sizes};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[5, 8], &Sizes::Balanced).unwrap();
    ///     assert_eq!((layout.local_shape_of(0), layout.local_shape_of(1)), (vec![3, 8], vec![2, 8]));
    ///     assert_eq!(layout.local_shape(), layout.local_shape_of(group.rank()));
    /// });
    /// ```
    pub fn local_shape_of(&self, index: usize) -> Vec<i64> {
        self.intervals_of(index).iter().map(|part| length(part)).collect()
    }

    /// The indices along each dim of the mesh's rank `index`, the last axis fastest.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, Sizes};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[5, 8], &Sizes::Chunk).unwrap();
    ///     let last = layout.intervals_of(1);
    ///     assert_eq!((last[0][0].start, last[0][0].len), (3, 2));
    ///     assert_eq!((last[1][0].start, last[1][0].len), (0, 8));
    /// });
    /// ```
    pub fn intervals_of(&self, index: usize) -> Vec<&[Interval]> {
        let at = coordinates(index, &self.0.mesh_shape);
        self.0.dims.iter().map(|dim| dim.part(&at, &self.0.mesh_shape)).collect()
    }

    /// The indices along each dim that this rank has.
    pub fn intervals(&self) -> Vec<&[Interval]> {
        let Some(at) = &self.0.coordinates else { return vec![&[]; self.ndim()] };
        self.0.dims.iter().map(|dim| dim.part(at, &self.0.mesh_shape)).collect()
    }

    /// The extents of all parts of a dim, in order: one for each combination of coordinates along the axes that shard it.
    ///
    /// # Errors
    ///
    /// No such dim.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, Sizes};
    ///
    /// threads::run(3, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[3], &["domain"]).unwrap();
    ///     let sizes_of = |sizes: &Sizes| {
    ///         Layout::new(&mesh, &[Placement::Shard(0)], &[7], sizes).unwrap().sizes(0).unwrap()
    ///     };
    ///     assert_eq!(sizes_of(&Sizes::Chunk), [3, 3, 1]);
    ///     assert_eq!(sizes_of(&Sizes::Balanced), [3, 2, 2]);
    ///     assert_eq!(sizes_of(&Sizes::Explicit(vec![(0, vec![1, 2, 4])])), [1, 2, 4]);
    /// });
    /// ```
    pub fn sizes(&self, dim: usize) -> Result<Vec<i64>> {
        Ok(self.0.dims.get(dim).ok_or_else(|| self.refuse(format!("there is no dim {dim}")))?.sizes())
    }

    /// Returns the offsets of the shards along `axis`, for each rank along the axis, at this rank's coordinates along the
    /// others; zeros if the axis shards no dim.
    ///
    /// # Errors
    ///
    /// No such axis.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, Sizes};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let layout = Layout::new(&mesh, &[Placement::Shard(1)], &[4, 5], &Sizes::Chunk).unwrap();
    ///     assert_eq!(layout.offsets(0).unwrap(), [0, 3]);
    /// });
    /// ```
    pub fn offsets(&self, axis: usize) -> Result<Vec<i64>> {
        let placement = self.0.placements.get(axis);
        let placement = placement.ok_or_else(|| self.refuse(format!("there is no axis {axis}")))?;
        let ranks = self.0.mesh_shape[axis];
        let (Some(dim), Some(own)) = (placement.dim(), &self.0.coordinates) else {
            return Ok(vec![0; ranks]);
        };
        let start = |rank| {
            let mut at = own.clone();
            at[axis] = rank;
            self.0.dims[dim].part(&at, &self.0.mesh_shape).first().map_or(0, |interval| interval.start)
        };
        Ok((0..ranks).map(start).collect())
    }

    /// The layout that the gradient of such a tensor has: the same, with partial axes replicated.
    ///
    /// ```
    /// use isobar_collectives::{Group, ReduceOp};
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, Sizes};
    ///
    /// let mesh = DeviceMesh::new(&Group::single(), &[1, 1], &["data", "domain"])?;
    /// let placements = [Placement::Partial(ReduceOp::Sum), Placement::Shard(0)];
    /// let layout = Layout::new(&mesh, &placements, &[4, 5], &Sizes::Chunk)?;
    /// assert_eq!(layout.without_partial().placements(), [Placement::Replicate, Placement::Shard(0)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn without_partial(&self) -> Self {
        if !self.is_partial() {
            return self.clone();
        }
        let placements = self.0.placements.iter().map(|placement| placement.without_partial()).collect();
        self.with_placements(placements, self.0.dims.clone())
    }

    /// The layout of what ranks contribute to a gradient, not yet added up along these axes: partial where the tensor is
    /// replicated.
    pub(crate) fn contributions(&self, axes: &[usize]) -> Self {
        let partial = |(axis, placement): (usize, &Placement)| match placement.without_partial() {
            Placement::Replicate if axes.contains(&axis) => Placement::Partial(ReduceOp::Sum),
            other => other,
        };
        self.with_placements(self.0.placements.iter().enumerate().map(partial).collect(), self.0.dims.clone())
    }

    /// Everything replicated.
    ///
    /// ```
    /// use isobar_collectives::Group;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, Sizes};
    ///
    /// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    /// let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[4, 5], &Sizes::Chunk)?;
    /// assert!(!layout.is_replicated() && layout.is_sharded(0));
    /// assert!(layout.replicated().is_replicated());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn replicated(&self) -> Self {
        self.replicated_shape(self.shape())
    }

    /// A replicated tensor of that shape on the same mesh.
    pub(crate) fn replicated_shape(&self, shape: &[i64]) -> Self {
        let dims = shape.iter().map(|&extent| Dim::whole(extent)).collect();
        self.with_placements(vec![Placement::Replicate; self.0.placements.len()], dims)
    }

    /// The layout with other placements on the same mesh: dims that stay split by the same axes keep their sizes, unless these
    /// are given one by one; others follow `sizes`.
    pub(crate) fn moved_to(&self, placements: &[Placement], sizes: &Sizes) -> Result<Self> {
        let fresh = Self::new(self.mesh(), placements, self.shape(), sizes)?;
        let keep = |(index, (own, new)): (usize, (&Dim, &Dim))| {
            let stays = sizes.table(index).is_none()
                && own.axes == new.axes
                && new.axes.iter().all(|&axis| self.0.placements[axis] == placements[axis]);
            if stays { own.clone() } else { new.clone() }
        };
        let dims = self.dims().iter().zip(fresh.dims()).enumerate().map(keep).collect();
        Ok(fresh.with_placements(placements.to_vec(), dims))
    }

    /// Returns whether an axis has a pending reduction.
    pub fn is_partial(&self) -> bool {
        self.0.placements.iter().any(|placement| placement.is_partial())
    }

    /// Returns whether the dim is sharded.
    pub fn is_sharded(&self, dim: usize) -> bool {
        self.0.dims.get(dim).is_some_and(Dim::is_split)
    }

    /// Returns whether all ranks hold the full tensor.
    pub fn is_replicated(&self) -> bool {
        self.0.placements.iter().all(|placement| *placement == Placement::Replicate)
    }

    pub(crate) fn dims(&self) -> &[Dim] {
        &self.0.dims
    }

    pub(crate) fn mesh_shape(&self) -> &[usize] {
        &self.0.mesh_shape
    }

    pub(crate) fn coordinates(&self) -> Option<&[usize]> {
        self.0.coordinates.as_deref()
    }

    /// The group of all ranks of the mesh. A rank outside is alone.
    pub(crate) fn ranks(&self) -> Result<&Ranks> {
        if let Some(ranks) = self.0.ranks.get() {
            return Ok(ranks);
        }
        let ranks = match self.coordinates() {
            None => Ranks { group: Group::single(), places: None, axes: Vec::new() },
            Some(_) => {
                let axes: Vec<usize> = (0..self.0.mesh_shape.len()).collect();
                let group = self.mesh().group_along(&axes)?;
                let order = self.mesh().ranks();
                let place = |rank: &usize| self.place(group.ranks(), *rank);
                let places = match group.ranks() == order {
                    true => None,
                    false => Some(order.iter().map(place).collect::<Result<_>>()?),
                };
                let along = if axes.len() > 1 { &axes[..] } else { &[] };
                let along =
                    along.iter().map(|&axis| self.mesh().group_along(&[axis])).collect::<Result<_, _>>()?;
                Ranks { group, places, axes: along }
            }
        };
        Ok(self.0.ranks.get_or_init(|| ranks))
    }

    /// Returns the position of a world rank in a list that must contain it.
    pub(crate) fn place(&self, list: &[usize], rank: usize) -> Result<usize> {
        let found = list.iter().position(|other| *other == rank);
        found.ok_or_else(|| self.refuse(format!("rank {rank} of the world is not among {list:?}")))
    }

    /// The ranks that differ from this one along these axes only.
    pub(crate) fn group_along(&self, axes: &[usize]) -> Result<Group> {
        match self.coordinates() {
            Some(_) => Ok(self.mesh().group_along(axes)?),
            None => Ok(Group::single()),
        }
    }

    /// Returns whether the ranks of the axis's group are in the order of their coordinates along it.
    pub(crate) fn is_in_order(&self, axis: usize) -> Result<bool> {
        let Some(own) = self.coordinates() else { return Ok(true) };
        let (order, group) = (self.mesh().ranks(), self.group_along(&[axis])?);
        let rank_at = |place: usize| {
            let mut at = own.to_vec();
            at[axis] = place;
            order[index_of(&at, self.mesh_shape())]
        };
        Ok((0..self.mesh_shape()[axis]).map(rank_at).eq(group.ranks().iter().copied()))
    }

    /// A number that tells layouts apart, the same on all ranks.
    pub(crate) fn digest(&self) -> u64 {
        self.0.digest
    }

    /// Elements of the whole.
    pub(crate) fn numel(&self) -> i64 {
        self.shape().iter().product()
    }

    /// The axes that split some dim.
    pub(crate) fn sharding_axes(&self) -> Vec<usize> {
        let axes = self.0.placements.iter().enumerate();
        axes.filter(|(_, placement)| placement.dim().is_some()).map(|(axis, _)| axis).collect()
    }

    /// Replaces the dims; the placements of the axes that shard them follow, the others stay.
    pub(crate) fn with_dims(&self, dims: Vec<Dim>) -> Self {
        let mut placements: Vec<Placement> = self
            .0
            .placements
            .iter()
            .map(|p| if p.is_partial() { *p } else { Placement::Replicate })
            .collect();
        for (index, dim) in dims.iter().enumerate() {
            for &axis in &dim.axes {
                placements[axis] = match self.0.placements[axis] {
                    strided @ Placement::StridedShard { .. } if !dim.is_consecutive() => {
                        strided.with_dim(index)
                    }
                    _ => Placement::Shard(index),
                };
            }
        }
        self.with_placements(placements, dims)
    }

    /// Moves the axes that shard one dim to another dim, in equal shards.
    pub(crate) fn all_to_all(&self, from: usize, to: usize) -> Self {
        let mut dims = self.dims().to_vec();
        let mut axes = [&dims[from].axes[..], &dims[to].axes[..]].concat();
        axes.sort_unstable();
        dims[from] = Dim::whole(dims[from].extent());
        let mesh = self.mesh_shape();
        let whole = Dim::whole(dims[to].extent());
        dims[to] = axes.iter().fold(whole, |dim, &axis| dim.split(axis, mesh[axis], &Sizes::Balanced, 1));
        self.with_dims(dims)
    }

    /// Takes over the shards of another layout along a dim, if both shard the same number of elements over the same axes.
    pub(crate) fn with_parts_of(&self, other: &Self, dim: usize) -> Self {
        let (own, parts) = (&self.dims()[dim], &other.dims()[dim]);
        match own.axes == parts.axes && own.extent() == parts.extent() {
            true => self.with_dim(dim, parts.clone()),
            false => self.clone(),
        }
    }

    /// Replaces one dim.
    pub(crate) fn with_dim(&self, dim: usize, parts: Dim) -> Self {
        let mut dims = self.0.dims.clone();
        dims[dim] = parts;
        self.with_dims(dims)
    }

    fn refuse(&self, problem: String) -> Error {
        Error::Layout {
            mesh: self.mesh().to_string(),
            placements: listed(self.placements()),
            shape: self.shape().to_vec(),
            problem,
        }
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.0, &*other.0);
        Arc::ptr_eq(&self.0, &other.0)
            || (a.digest == b.digest && a.placements == b.placements && a.dims == b.dims && a.mesh == b.mesh)
    }
}

impl Eq for Layout {}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {}", self.shape(), self.mesh())?;
        let names = self.mesh().names();
        for (index, (placement, name)) in self.placements().iter().zip(names).enumerate() {
            write!(f, "{} {name} {placement}", if index == 0 { ":" } else { "," })?;
            if let Some(dim) = placement.dim() {
                write!(f, " of {:?}", self.0.dims[dim].sizes())?;
                let whole =
                    self.placements().iter().all(|p| p.dim() != Some(dim) || *p == Placement::Shard(dim));
                if whole && self.0.dims[dim].parts.iter().any(|part| part.len() > 1) {
                    f.write_str(" in several pieces")?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Placements as errors show them.
pub(crate) fn listed(placements: &[Placement]) -> String {
    let listed: Vec<String> = placements.iter().map(Placement::to_string).collect();
    format!("[{}]", listed.join(", "))
}

/// Returns the coordinates of a rank, the last axis fastest.
pub(crate) fn coordinates(mut index: usize, mesh: &[usize]) -> Vec<usize> {
    let mut at = vec![0; mesh.len()];
    for (coordinate, extent) in at.iter_mut().zip(mesh).rev() {
        *coordinate = index % extent;
        index /= extent;
    }
    at
}

/// The number of the rank that is there.
pub(crate) fn index_of(coordinates: &[usize], mesh: &[usize]) -> usize {
    coordinates.iter().zip(mesh).fold(0, |index, (coordinate, extent)| index * extent + coordinate)
}

#[cfg(test)]
mod tests;
