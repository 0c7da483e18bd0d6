//! From one layout to another.

use std::sync::Arc;

use isobar_collectives::{LinearMap, ReduceOp, Work, attach, start, windows};
use isobar_mesh::DeviceMesh;
use isobar_torch::guard::{NoGrad, is_grad_enabled};
use tch::{Kind, Tensor};

use super::{ShardTensor, Use};
use crate::context::CurrentMesh;
use crate::error::{Error, Result};
use crate::layout::{Dim, Interval, Layout, Placement, Sizes, coordinates};
use crate::window::{HaloSpec, transfer};

/// Options of a redistribution, besides its placements.
#[derive(Debug, Clone, Default)]
pub struct Redistribute {
    /// The sizes of the dims that are split otherwise than before.
    pub sizes: Sizes,
    /// The dtype in which values travel, where not their own.
    pub forward_kind: Option<Kind>,
    /// The dtype in which gradients travel, where not their own.
    pub backward_kind: Option<Kind>,
}

/// A redistribution under way.
#[must_use = "a redistribution ends when it is waited for"]
pub struct Pending {
    source: ShardTensor,
    map: Redistribution,
    stage: Stage,
    /// The parameter that is on its way stays until it has come.
    values: Option<Use>,
}

enum Stage {
    /// Nothing to do.
    Same,
    /// The values of the map are on their way.
    Last(Work<Tensor>, Kind),
    /// A reduction comes first; the rest follows when it is waited for.
    First(Work<Tensor>, Redistribution),
}

impl ShardTensor {
    /// Redistributes the tensor to other placements, on this mesh or on another one (or the current one) of the same ranks.
    ///
    /// By the cheapest way there is: nothing; this rank's slice, which shares memory with what it is of; an exchange in which
    /// every rank receives what it lacks, and nothing else; a reduction, scattered where the target is. Dims that stay split
    /// by the same axes keep their sizes, others are chunked as DTensor does. Differentiable: the gradient comes back in this
    /// tensor's layout.
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// A layout that cannot be; a target that is partial where this tensor is not; another mesh of other ranks; the errors of
    /// the exchange.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let whole = Tensor::arange(24, (Kind::Double, Device::Cpu)).view([4, 6]);
    ///     let rows = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap();
    ///     // An all-to-all, from rows to columns.
    ///     let columns = rows.redistribute(None, &[Placement::Shard(1)]).unwrap();
    ///     assert_eq!((rows.local_shape(), columns.local_shape()), (&[2, 6][..], &[4, 3][..]));
    ///     assert_eq!(*columns.local(), whole.narrow(1, 3 * group.rank() as i64, 3));
    /// });
    /// ```
    pub fn redistribute(&self, mesh: Option<&DeviceMesh>, placements: &[Placement]) -> Result<Self> {
        self.redistribute_with(mesh, placements, &Redistribute::default())
    }

    /// Redistributes as [`redistribute`](Self::redistribute), with options.
    ///
    /// # Errors
    ///
    /// See [`redistribute`](Self::redistribute).
    pub fn redistribute_with(
        &self,
        mesh: Option<&DeviceMesh>,
        placements: &[Placement],
        options: &Redistribute,
    ) -> Result<Self> {
        let to = self.target(mesh, placements, &options.sizes)?;
        self.through(Redistribution::new(&self.layout, &to, options)?)
    }

    /// Begins a redistribution; what is computed before it is waited for overlaps with it.
    ///
    /// # Errors
    ///
    /// See [`redistribute`](Self::redistribute).
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, Redistribute, ShardTensor};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let whole = Tensor::ones([4, 6], (Kind::Float, Device::Cpu));
    ///     let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap();
    ///     let options = Redistribute::default();
    ///     let pending = x.start_redistribute(None, &[Placement::Replicate], &options).unwrap();
    ///     // Compute something else here.
    ///     assert_eq!(*pending.wait().unwrap().local(), whole);
    /// });
    /// ```
    pub fn start_redistribute(
        &self,
        mesh: Option<&DeviceMesh>,
        placements: &[Placement],
        options: &Redistribute,
    ) -> Result<Pending> {
        let to = self.target(mesh, placements, &options.sizes)?;
        self.begin(Redistribution::new(&self.layout, &to, options)?)
    }

    /// Begins to bring the tensor into this layout.
    ///
    /// # Errors
    ///
    /// See [`redistribute`](Self::redistribute).
    pub(crate) fn start_to_layout(&self, to: &Layout) -> Result<Pending> {
        self.begin(Redistribution::new(&self.layout, to, &Redistribute::default())?)
    }

    fn begin(&self, map: Redistribution) -> Result<Pending> {
        let values = Use::enter(&[self])?;
        let _guard = NoGrad::new();
        let local = self.local.detach();
        let stage = if map.from == map.to {
            Stage::Same
        } else if let Some((middle, op, axes)) = reduction(&map.from, &map.to)? {
            let reduced = map.start_reduction(&local, &middle, op, &axes)?;
            Stage::First(reduced, Redistribution { from: middle, ..map.copy() })
        } else {
            Stage::Last(map.start_exchange(&local)?, local.kind())
        };
        Ok(Pending { source: self.shallow_clone(), map, stage, values })
    }

    /// Redistributes the tensor to this layout.
    ///
    /// # Errors
    ///
    /// See [`redistribute`](Self::redistribute).
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let whole = Tensor::arange(6, (Kind::Double, Device::Cpu));
    ///     let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap();
    ///     let sizes = Sizes::Explicit(vec![(0, vec![5, 1])]);
    ///     let uneven = Layout::new(&mesh, &[Placement::Shard(0)], &[6], &sizes).unwrap();
    ///     assert_eq!(x.to_layout(&uneven).unwrap().local_shape(), [[5], [1]][group.rank()]);
    /// });
    /// ```
    pub fn to_layout(&self, to: &Layout) -> Result<Self> {
        if self.layout == *to {
            return Ok(self.shallow_clone());
        }
        self.through(Redistribution::new(&self.layout, to, &Redistribute::default())?)
    }

    /// Reduces partial axes, which become replicated.
    pub(crate) fn resolved(&self) -> Result<Self> {
        if self.layout.is_partial() {
            self.to_layout(&self.layout.without_partial())
        } else {
            Ok(self.shallow_clone())
        }
    }

    fn through(&self, map: Redistribution) -> Result<Self> {
        if map.from == map.to {
            return Ok(self.shallow_clone());
        }
        let watched = Use::enter(&[self])?;
        let mut moved = self.moved(map)?;
        if let Some(watched) = watched {
            watched.mark(&[self], &mut moved)?;
        }
        Ok(moved)
    }

    fn moved(&self, map: Redistribution) -> Result<Self> {
        if let Some(own) = self.own_slice(&map)? {
            return Ok(own);
        }
        let to = map.to.clone();
        let y = {
            let _guard = NoGrad::new();
            map.run(&self.local.detach())?
        };
        Ok(Self::new(attached(map, &self.local, y)?, to))
    }

    /// Returns this rank's slice if the gradient is pending and the target's shard is a slice of this rank's; its gradient is
    /// pending too.
    fn own_slice(&self, map: &Redistribution) -> Result<Option<Self>> {
        let sliced = map.from.is_replicated() && map.from.mesh() == map.to.mesh() && map.keeps_kinds();
        if !sliced || !self.is_pending_along(&map.to.sharding_axes()) {
            return Ok(None);
        }
        let parts: Vec<Vec<Interval>> = map.to.intervals().into_iter().map(<[Interval]>::to_vec).collect();
        let slice = |x: &Tensor| {
            let along = |x: Tensor, (dim, parts): (usize, &Vec<Interval>)| match &parts[..] {
                [] => x.f_narrow(dim as i64, 0, 0),
                [one] if one.len == x.size()[dim] => Ok(x),
                [one] => x.f_narrow(dim as i64, one.start, one.len),
                many => {
                    let indices: Vec<i64> = many.iter().flat_map(|part| part.start..part.end()).collect();
                    x.f_index_select(dim as i64, &Tensor::f_from_slice(&indices)?.f_to_device(x.device())?)
                }
            };
            parts.iter().enumerate().try_fold(x.shallow_clone(), along)
        };
        self.viewed("redistribute", map.to.clone(), slice).map(Some)
    }

    fn target(&self, mesh: Option<&DeviceMesh>, placements: &[Placement], sizes: &Sizes) -> Result<Layout> {
        let mesh = mesh.cloned().or_else(CurrentMesh::get).unwrap_or_else(|| self.device_mesh().clone());
        match mesh == *self.device_mesh() {
            true => self.layout.moved_to(placements, sizes),
            false => Layout::new(&mesh, placements, self.shape(), sizes),
        }
    }
}

impl Pending {
    /// The redistributed tensor.
    ///
    /// # Errors
    ///
    /// Those of the exchange.
    pub fn wait(self) -> Result<ShardTensor> {
        let y = match self.stage {
            Stage::Same => return Ok(self.source),
            Stage::Last(work, kind) => work.wait()?.f_to_kind(kind).map_err(operator)?,
            Stage::First(work, rest) => {
                let _guard = NoGrad::new();
                let reduced = work.wait()?.f_to_kind(self.source.kind()).map_err(operator)?;
                if rest.from == rest.to { reduced } else { rest.run(&reduced)? }
            }
        };
        let to = self.map.to.clone();
        let mut moved = ShardTensor::new(attached(self.map, &self.source.local, y)?, to);
        if let Some(values) = self.values {
            values.mark(&[&self.source], &mut moved)?;
        }
        Ok(moved)
    }
}

/// The map between the parts of two layouts of one tensor. Its adjoint is the way back, where partial values have replicated
/// gradients (design decision 2).
struct Redistribution {
    from: Layout,
    to: Layout,
    forward_kind: Option<Kind>,
    backward_kind: Option<Kind>,
}

impl Redistribution {
    fn new(from: &Layout, to: &Layout, options: &Redistribute) -> Result<Self> {
        let refuse =
            |reason: String| Error::from(isobar_array::Error::Argument { op: "redistribute", reason });
        if from.shape() != to.shape() {
            return Err(refuse(format!("{from} and {to} are of different shapes")));
        }
        let same_mesh = from.mesh() == to.mesh();
        for (axis, placement) in to.placements().iter().enumerate() {
            if placement.is_partial() && !(same_mesh && from.placements()[axis] == *placement) {
                return Err(refuse(format!(
                    "{to} is partial where {from} is not; partial tensors come from from_local and from operators"
                )));
            }
        }
        if !same_mesh {
            let sorted = |layout: &Layout| {
                let mut ranks = layout.mesh().ranks();
                ranks.sort_unstable();
                ranks
            };
            if sorted(from) != sorted(to) {
                return Err(refuse(format!("the meshes of {from} and {to} have different ranks")));
            }
        }
        let Redistribute { forward_kind, backward_kind, .. } = *options;
        Ok(Self { from: from.clone(), to: to.clone(), forward_kind, backward_kind })
    }

    fn keeps_kinds(&self) -> bool {
        self.forward_kind.is_none() && self.backward_kind.is_none()
    }

    fn copy(&self) -> Self {
        Self { from: self.from.clone(), to: self.to.clone(), ..*self }
    }

    fn run(&self, x: &Tensor) -> Result<Tensor> {
        let kind = x.kind();
        if let Some((middle, op, axes)) = reduction(&self.from, &self.to)? {
            let reduced =
                self.start_reduction(x, &middle, op, &axes)?.wait()?.f_to_kind(kind).map_err(operator)?;
            if middle == self.to {
                return Ok(reduced);
            }
            return Self { from: middle, ..self.copy() }.run(&reduced);
        }
        self.start_exchange(x)?.wait()?.f_to_kind(kind).map_err(operator)
    }

    fn start_reduction(
        &self,
        x: &Tensor,
        middle: &Layout,
        op: ReduceOp,
        axes: &[usize],
    ) -> Result<Work<Tensor>> {
        let wire = self.forward_kind.unwrap_or(x.kind());
        let x = x.f_to_kind(wire).map_err(operator)?;
        let group = self.from.group_along(axes)?;
        if let ([axis], Placement::Shard(dim)) = (axes, middle.placements()[axes[0]])
            && middle.dims()[dim].axes == [*axis]
            && !self.from.dims()[dim].is_split()
        {
            let sizes = middle.dims()[dim].sizes();
            return Ok(start::reduce_scatter_v(&x, Some(&sizes), dim as i64, op, true, &group)?);
        }
        Ok(start::all_reduce(&x, op, &group)?)
    }

    fn start_exchange(&self, x: &Tensor) -> Result<Work<Tensor>> {
        let needs: Vec<HaloSpec> = match self.from.mesh() == self.to.mesh() {
            true => self.to.dims().iter().map(HaloSpec::own).collect(),
            false => self.needs_of_other_mesh()?,
        };
        let share = transfer(&self.from, &needs, &[])?;
        // Elements that are not sent are not rounded.
        let wire = self.forward_kind.filter(|_| share.communicates).unwrap_or(x.kind());
        let x = x.f_to_kind(wire).map_err(operator)?;
        Ok(windows::fetch(&x, &share, 0.0, &self.from.ranks()?.group)?)
    }

    /// Returns the needs of each rank of the source's mesh, by its position there.
    fn needs_of_other_mesh(&self) -> Result<Vec<HaloSpec>> {
        let (from, to) = (self.from.mesh(), self.to.mesh());
        let (theirs, shape) = (to.ranks(), self.to.mesh_shape());
        let places: Vec<usize> =
            from.ranks().into_iter().map(|rank| self.to.place(&theirs, rank)).collect::<Result<_>>()?;
        let axes: Vec<usize> = (0..self.from.mesh_shape().len()).collect();
        let need = |dim: &Dim| {
            let whole = HaloSpec::own(dim);
            let part = |&place: &usize| whole.at(&coordinates(place, shape), shape).to_vec();
            HaloSpec { axes: axes.clone(), parts: places.iter().map(part).collect() }
        };
        Ok(self.to.dims().iter().map(need).collect())
    }
}

/// The next reduction on the way from one layout to another: the layout after it, the operation and the axes.
pub(crate) fn reduction(from: &Layout, to: &Layout) -> Result<Option<(Layout, ReduceOp, Vec<usize>)>> {
    let same_mesh = from.mesh() == to.mesh();
    let pending = |axis: usize| match from.placements()[axis] {
        Placement::Partial(op) if !same_mesh || !to.placements()[axis].is_partial() => Some(op),
        _ => None,
    };
    let axes = 0..from.placements().len();
    let Some(op) = axes.clone().find_map(pending) else { return Ok(None) };
    let axes: Vec<usize> = axes.filter(|&axis| pending(axis) == Some(op)).collect();
    let mut placements = from.placements().to_vec();
    let mut dims = from.dims().to_vec();
    for &axis in &axes {
        placements[axis] = Placement::Replicate;
    }
    // Scattered at once, where the target is a dim that only this axis splits.
    if let ([axis], true) = (&axes[..], same_mesh)
        && let Placement::Shard(dim) = to.placements()[*axis]
        && !dims[dim].is_split()
        && to.dims()[dim].axes == [*axis]
        && to.dims()[dim].is_consecutive()
        && from.is_in_order(*axis)?
    {
        placements[*axis] = Placement::Shard(dim);
        dims[dim] = to.dims()[dim].clone();
    }
    Ok(Some((from.with_placements(placements, dims), op, axes)))
}

impl LinearMap for Redistribution {
    fn name(&self) -> &'static str {
        "redistribute"
    }

    fn forward(&self, x: &Tensor) -> isobar_collectives::Result<Tensor> {
        self.run(x).map_err(Error::into_communication)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(Self {
            from: self.to.without_partial(),
            to: self.from.without_partial(),
            forward_kind: self.backward_kind,
            backward_kind: self.forward_kind,
        })
    }
}

fn attached(map: Redistribution, x: &Tensor, y: Tensor) -> Result<Tensor> {
    if !is_grad_enabled() || !x.requires_grad() {
        return Ok(y);
    }
    Ok(attach(Arc::new(map), x, y)?)
}

fn operator(source: tch::TchError) -> Error {
    Error::from(isobar_array::Error::Operator { op: "redistribute", shapes: "a part".into(), source })
}
