//! Making sharded tensors.

use isobar_array::kernel::check_number;
use isobar_collectives::windows::{Transfer, fetch};
use isobar_mesh::DeviceMesh;
use tch::{Device, Kind, Tensor};

use super::ShardTensor;
use crate::context::CurrentMesh;
use crate::error::{Error, Result};
use crate::layout::{Layout, Placement, Sizes};
use crate::window::{HaloSpec, transfer};

impl ShardTensor {
    /// The tensor whose parts the ranks hold as `local`.
    ///
    /// `mesh` is the current one ([`CurrentMesh`]) where not given. The global `shape` follows from the sizes where they
    /// are [`Sizes::Explicit`] for all sharded dims or [`Sizes::Infer`], and is needed for the others. Differentiable.
    ///
    /// All ranks of the mesh call. Only `Infer` communicates: one exchange of shapes. With the others, a rank whose part does
    /// not fit gets an error, and the others get it at their next call on the mesh; [`from_local_checked`](Self::from_local_checked) tells all at once.
    ///
    /// # Errors
    ///
    /// A layout that cannot be; a part that does not fit it; parts that fit no layout.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor, Sizes};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     // Rank 0 has 2 rows, rank 1 has 3: they are found by one exchange of shapes.
    ///     let rows = Tensor::ones([[2, 3][group.rank()], 4], (Kind::Float, Device::Cpu));
    ///     let x = ShardTensor::from_local(&rows, Some(&mesh), &[Placement::Shard(0)], &Sizes::Infer, None).unwrap();
    ///     assert_eq!(x.shape(), [5, 4]);
    /// });
    /// ```
    pub fn from_local(
        local: &Tensor,
        mesh: Option<&DeviceMesh>,
        placements: &[Placement],
        sizes: &Sizes,
        shape: Option<&[i64]>,
    ) -> Result<Self> {
        let mesh = CurrentMesh::or_given(mesh)?;
        let layout = match sizes {
            Sizes::Infer => infer(local, &mesh, placements)?,
            _ => Layout::new(&mesh, placements, &global_shape(local, placements, sizes, shape)?, sizes)?,
        };
        Self::from_parts(local, &layout)
    }

    /// Makes a tensor as [`from_local`](Self::from_local), after one exchange in which all ranks compare their layouts and
    /// parts: an error on one rank is an error on all.
    ///
    /// # Errors
    ///
    /// As [`from_local`](Self::from_local), and ranks that mean different layouts.
    pub fn from_local_checked(
        local: &Tensor,
        mesh: Option<&DeviceMesh>,
        placements: &[Placement],
        sizes: &Sizes,
        shape: Option<&[i64]>,
    ) -> Result<Self> {
        let mesh = CurrentMesh::or_given(mesh)?;
        let made = checked_layout(local, &mesh, placements, sizes, shape);
        let mine = match &made {
            Ok(layout) => format!("{:?} of {layout}", local.kind()),
            Err(error) => format!("!{error}"),
        };
        let group = mesh.group_along(&(0..mesh.ndim()).collect::<Vec<_>>())?;
        let all = group.all_gather_bytes(mine.as_bytes())?;
        let texts: Vec<String> = all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
        let wrong = texts.iter().position(|text| text.starts_with('!'));
        let other = texts.iter().position(|text| *text != texts[0]);
        match (made, wrong, other) {
            (_, Some(rank), _) => Err(crate::dense::argument(
                "from_local",
                format!("rank {rank} of the mesh: {}", &texts[rank][1..]),
            )),
            (_, None, Some(rank)) => Err(Error::from(isobar_array::Error::Argument {
                op: "from_local",
                reason: format!(
                    "ranks mean different tensors: rank 0 of the mesh {}, rank {rank} {}",
                    texts[0], texts[rank]
                ),
            })),
            (made, None, None) => Self::from_parts(local, &made?),
        }
    }

    /// The tensor of this layout whose parts the ranks hold as `local`: what [`from_local`](Self::from_local) does, for a
    /// layout that is there already, such as another tensor's. Differentiable; does not communicate.
    ///
    /// # Errors
    ///
    /// A part of another shape than the layout says; the other ranks get the error at their next call on the mesh.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let whole = Tensor::arange(5, (Kind::Double, Device::Cpu));
    ///     let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap();
    ///     // A function of each element, by plain tch on each rank's shard.
    ///     let y = ShardTensor::from_parts(&x.local().sin(), x.layout()).unwrap();
    ///     assert_eq!(y.full_tensor(None).unwrap(), whole.sin());
    /// });
    /// ```
    pub fn from_parts(local: &Tensor, layout: &Layout) -> Result<Self> {
        if layout.coordinates().is_some() && local.size() != layout.local_shape() {
            let error = misfit(local, layout);
            for group in layout.ranks()?.groups() {
                let _ = group.refuse("from_local", error.to_string());
            }
            return Err(error);
        }
        for group in layout.ranks()?.groups() {
            group.fingerprint_with(layout.digest());
        }
        let tensor = Self::new(local.shallow_clone(), layout.clone());
        if layout.is_partial() { tensor.entering_parts() } else { Ok(tensor) }
    }

    /// This rank's part of `whole`, which is the same on all ranks. Differentiable; the gradient of `whole` is whole on all
    /// ranks. Chunks, as DTensor.
    ///
    /// Does not communicate; backward does, and all ranks of the mesh call it.
    ///
    /// # Errors
    ///
    /// A layout that cannot be, or a partial one.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     // A field [batch, channel, height, width] in bands of rows.
    ///     let field = Tensor::zeros([1, 3, 9, 16], (Kind::Float, Device::Cpu));
    ///     let x = ShardTensor::distribute(&field, &mesh, &[Placement::Shard(2)]).unwrap();
    ///     assert_eq!((x.shape(), x.local_shape()), (&[1, 3, 9, 16][..], &[1, 3, [5, 4][group.rank()], 16][..]));
    /// });
    /// ```
    pub fn distribute(whole: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        let layout = Layout::new(mesh, placements, &whole.size(), &Sizes::Chunk)?;
        Self::distribute_as(whole, &layout)
    }

    /// Distributes a tensor in a layout with any sizes.
    ///
    /// # Errors
    ///
    /// A tensor of another shape than the layout's; a partial layout.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
    /// use tch::Tensor;
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let sizes = Sizes::Explicit(vec![(0, vec![1, 2])]);
    ///     let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[3], &sizes).unwrap();
    ///     let x = ShardTensor::distribute_as(&Tensor::from_slice(&[1.0, 2.0, 3.0]), &layout).unwrap();
    ///     let want: &[f64] = [&[1.0][..], &[2.0, 3.0]][group.rank()];
    ///     assert_eq!(*x.local(), Tensor::from_slice(want));
    /// });
    /// ```
    pub fn distribute_as(whole: &Tensor, layout: &Layout) -> Result<Self> {
        let replicated = layout.replicated();
        if layout.coordinates().is_none() {
            return Ok(Self::new(
                Tensor::f_zeros(layout.local_shape(), (whole.kind(), whole.device()))
                    .map_err(|e| failed("distribute", e))?,
                layout.clone(),
            ));
        }
        let part = Self::from_parts(whole, &replicated)?.to_layout(layout)?;
        if part.requires_grad() || layout.sharding_axes().is_empty() {
            return Ok(part);
        }
        // A part of its own, so that it does not keep the whole.
        let own = part.local().f_detach_copy().map_err(|e| failed("distribute", e))?;
        Ok(Self::new(own, layout.clone()))
    }

    /// Hands rank `src` of the mesh's tensor out: each rank gets its part, and nothing more travels. Only `src` gives the
    /// tensor. The result is a leaf, which requires a gradient where `requires_grad` says so.
    ///
    /// All ranks of the mesh call; the shape and the dtype go out first.
    ///
    /// # Errors
    ///
    /// A source rank out of range, or one that gives no tensor; a tensor on a GPU without NCCL; an invalid layout.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor, Sizes};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     // Only rank 0 has read the field.
    ///     let field = (group.rank() == 0).then(|| Tensor::ones([6, 4], (Kind::Float, Device::Cpu)));
    ///     let placements = [Placement::Shard(0)];
    ///     let x = ShardTensor::scatter(field.as_ref(), 0, &mesh, &placements, &Sizes::Chunk, false).unwrap();
    ///     assert_eq!(x.local_shape(), [3, 4]);
    /// });
    /// ```
    pub fn scatter(
        whole: Option<&Tensor>,
        src: usize,
        mesh: &DeviceMesh,
        placements: &[Placement],
        sizes: &Sizes,
        requires_grad: bool,
    ) -> Result<Self> {
        let axes: Vec<usize> = (0..mesh.ndim()).collect();
        let group = mesh.group_along(&axes)?;
        let ranks = mesh.ranks();
        let Some(root) = ranks.get(src).and_then(|rank| group.ranks().iter().position(|r| r == rank)) else {
            return Err(argument("scatter", format!("the source {src} is not a rank of {mesh}")));
        };
        let is_source = group.rank() == root;
        let mine = match (is_source, whole) {
            (true, Some(whole)) => {
                let shape = whole.size();
                let on_gpu = i64::from(whole.device().is_cuda());
                let numbers = [whole.kind() as i64, on_gpu].into_iter().chain(shape);
                numbers.flat_map(i64::to_le_bytes).collect()
            }
            _ => Vec::new(),
        };
        let received = group.broadcast_bytes(&mine, root)?;
        let numbers: Vec<i64> =
            received.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default())).collect();
        let Some((&[kind, on_gpu], shape)) = numbers.split_first_chunk() else {
            return Err(argument("scatter", format!("rank {src} of {mesh}, the source, gave no tensor")));
        };
        let kind =
            kind_of(kind).ok_or_else(|| argument("scatter", format!("dtype number {kind} is unknown")))?;
        let layout = Layout::new(mesh, placements, shape, sizes)?;
        if layout.is_partial() {
            return Err(argument(
                "scatter",
                format!("the layout {layout} is partial; expected shards and replicas"),
            ));
        }
        let device = match (on_gpu, group.gpu(), whole.filter(|_| is_source)) {
            (0, ..) => Device::Cpu,
            (_, Some(gpu), None) => gpu,
            (_, gpu, Some(whole)) if gpu.is_some() || group.size() == 1 => whole.device(),
            _ => {
                let reason = "the tensor is on a GPU, but the group does not use NCCL; move the tensor to the CPU first";
                return Err(argument("scatter", reason.to_owned()));
            }
        };
        let parts = parts_from(&layout, root, is_source)?;
        let empty;
        let input = match (is_source, whole) {
            (true, Some(whole)) => whole,
            _ => {
                empty = Tensor::f_zeros(vec![0; shape.len()], (kind, device))
                    .map_err(|e| failed("scatter", e))?;
                &empty
            }
        };
        let part = fetch(input, &parts, 0.0, &group)?.wait()?;
        // A part of its own, so that it does not keep the whole.
        let part = if is_source { part.f_detach_copy().map_err(|e| failed("scatter", e))? } else { part };
        let part = part.f_set_requires_grad(requires_grad).map_err(|e| failed("scatter", e))?;
        Ok(Self::new(part, layout))
    }

    /// Zeros.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    ///
    /// ```
    /// use isobar_collectives::Group;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
    /// use tch::{Device, Kind};
    ///
    /// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    /// let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[4, 5], &Sizes::Chunk)?;
    /// let x = ShardTensor::zeros(&layout, Kind::Float, Device::Cpu)?;
    /// assert_eq!((x.shape(), x.kind()), (&[4, 5][..], Kind::Float));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn zeros(layout: &Layout, kind: Kind, device: Device) -> Result<Self> {
        Self::full(layout, 0.0, kind, device)
    }

    /// Ones.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn ones(layout: &Layout, kind: Kind, device: Device) -> Result<Self> {
        Self::full(layout, 1.0, kind, device)
    }

    /// `value` everywhere. Of a partial layout, one rank has the value and the others what changes nothing (for averages and
    /// extrema, all have it).
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn full(layout: &Layout, value: f64, kind: Kind, device: Device) -> Result<Self> {
        use isobar_collectives::ReduceOp;
        check_number("full", value, kind)?;
        let own = |axis: usize| layout.coordinates().is_none_or(|at| at[axis] == 0);
        let others = |op: ReduceOp| {
            let mut axes = layout.placements().iter().enumerate();
            axes.any(|(axis, placement)| *placement == Placement::Partial(op) && !own(axis))
        };
        // A pending sum takes precedence: a factor of 1 would be a summand.
        let value = match (others(ReduceOp::Sum), others(ReduceOp::Product)) {
            (true, _) => 0.0,
            (false, true) => 1.0,
            (false, false) => value,
        };
        let local =
            Tensor::f_full(layout.local_shape(), value, (kind, device)).map_err(|e| failed("full", e))?;
        Ok(Self::new(local, layout.clone()))
    }

    /// Memory that is not filled.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn empty(layout: &Layout, kind: Kind, device: Device) -> Result<Self> {
        let local = Tensor::f_empty(layout.local_shape(), (kind, device)).map_err(|e| failed("empty", e))?;
        Ok(Self::new(local, layout.clone()))
    }

    /// `start, start + step, …` along the single dim of the layout.
    ///
    /// # Errors
    ///
    /// A layout of more or fewer dims than one, or a partial one.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[4], &Sizes::Chunk).unwrap();
    ///     // Each rank computes its own coordinates.
    ///     let x = ShardTensor::arange(&layout, 10.0, 0.5, Kind::Double, Device::Cpu).unwrap();
    ///     let want = [[10.0, 10.5], [11.0, 11.5]][group.rank()];
    ///     assert_eq!(*x.local(), Tensor::from_slice(&want));
    /// });
    /// ```
    pub fn arange(layout: &Layout, start: f64, step: f64, kind: Kind, device: Device) -> Result<Self> {
        if layout.ndim() != 1 || layout.is_partial() {
            return Err(Error::from(isobar_array::Error::Argument {
                op: "arange",
                reason: format!("expected one dim, not partial, got {layout}"),
            }));
        }
        let whole = kind == Kind::Int64 && step.fract() == 0.0 && start.fract() == 0.0;
        let wide = if whole { Kind::Int64 } else { Kind::Double };
        let pieces: Result<Vec<Tensor>> = layout.intervals()[0]
            .iter()
            .map(|part| {
                let index = Tensor::f_arange_start(part.start, part.end(), (wide, device));
                let scaled = index.and_then(|index| match wide {
                    Kind::Int64 => index.f_mul_scalar(step as i64)?.f_add_scalar(start as i64),
                    _ => index.f_mul_scalar(step)?.f_add_scalar(start),
                });
                scaled.and_then(|values| values.f_to_kind(kind)).map_err(|e| failed("arange", e))
            })
            .collect();
        let local = match &pieces?[..] {
            [] => Tensor::f_zeros([0], (kind, device)),
            many => Tensor::f_cat(many, 0),
        };
        let local = local.map_err(|e| failed("arange", e))?;
        Ok(Self::new(local, layout.clone()))
    }
}

/// The exchange in which one rank has everything.
fn parts_from(layout: &Layout, root: usize, is_source: bool) -> Result<Transfer> {
    // As one rank that gives to itself, seen from each target.
    let replicated = layout.replicated();
    let needs: Vec<HaloSpec> = layout.dims().iter().map(HaloSpec::own).collect();
    let own = transfer(&replicated, &needs, &[])?;
    let mut share = Transfer {
        input: if is_source { layout.shape().to_vec() } else { vec![0; layout.ndim()] },
        output: own.output.clone(),
        communicates: layout.ranks()?.group.size() > 1,
        fingerprint: layout.digest(),
        ..Transfer::default()
    };
    let ranks = layout.ranks()?;
    let place = |mesh_index: usize| ranks.places.as_ref().map_or(mesh_index, |places| places[mesh_index]);
    let count: usize = layout.mesh_shape().iter().product();
    let me = ranks.group.rank();
    for target in 0..count {
        let blocks = crate::window::whole_blocks(layout, target);
        match (is_source, place(target) == me) {
            (true, true) => share.own = blocks,
            (true, false) if !blocks.is_empty() => {
                share.sends.push((
                    place(target),
                    crate::window::as_blocks(blocks.into_iter().map(|(from, _)| from), layout),
                ));
            }
            (false, true) if !blocks.is_empty() => {
                share
                    .receives
                    .push((root, crate::window::as_blocks(blocks.into_iter().map(|(_, to)| to), layout)));
            }
            _ => {}
        }
    }
    Ok(share)
}

/// The global shape: given, or as the sizes tell.
fn global_shape(
    local: &Tensor,
    placements: &[Placement],
    sizes: &Sizes,
    shape: Option<&[i64]>,
) -> Result<Vec<i64>> {
    match (shape, sizes) {
        (Some(shape), _) => Ok(shape.to_vec()),
        (None, Sizes::Explicit(_)) => Ok(explicit_shape(local, placements, sizes)),
        (None, _) if placements.iter().all(|p| p.dim().is_none()) => Ok(local.size()),
        (None, _) => Err(Error::from(isobar_array::Error::Argument {
            op: "from_local",
            reason: format!("sizes by the rule {sizes:?} need the global shape; give it, or Sizes::Infer"),
        })),
    }
}

/// The layout that is meant, if the part fits it.
fn checked_layout(
    local: &Tensor,
    mesh: &DeviceMesh,
    placements: &[Placement],
    sizes: &Sizes,
    shape: Option<&[i64]>,
) -> Result<Layout> {
    let layout = match sizes {
        Sizes::Infer => infer(local, mesh, placements)?,
        _ => Layout::new(mesh, placements, &global_shape(local, placements, sizes, shape)?, sizes)?,
    };
    if layout.coordinates().is_some() && local.size() != layout.local_shape() {
        return Err(misfit(local, &layout));
    }
    Ok(layout)
}

/// The global shape of which the tables give all sharded extents.
fn explicit_shape(local: &Tensor, placements: &[Placement], sizes: &Sizes) -> Vec<i64> {
    let mut shape = local.size();
    for dim in placements.iter().filter_map(|placement| placement.dim()) {
        if let (Some(table), Some(extent)) = (sizes.table(dim), shape.get_mut(dim)) {
            *extent = table.iter().sum();
        }
    }
    shape
}

/// The layout that the ranks' parts have.
fn infer(local: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Layout> {
    let axes: Vec<usize> = (0..mesh.ndim()).collect();
    if placements.len() != axes.len() {
        return Err(argument(
            "from_local",
            format!("{} placements on {mesh}; expected one for each axis", placements.len()),
        ));
    }
    let group = mesh.group_along(&axes)?;
    let mine: Vec<u8> = local.size().into_iter().flat_map(i64::to_le_bytes).collect();
    let all = group.all_gather_bytes(&mine)?;
    let order = mesh.ranks();
    let shape_of = |index: usize| -> Vec<i64> {
        let place = group.ranks().iter().position(|rank| *rank == order[index]).unwrap_or(index);
        all[place].chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default())).collect()
    };
    let shapes: Vec<Vec<i64>> = (0..order.len()).map(shape_of).collect();
    let mesh_shape = mesh.shape();
    let dims = shapes[0].len();
    if let Some(other) = shapes.iter().position(|shape| shape.len() != dims) {
        return Err(argument(
            "from_local",
            format!(
                "ranks hold parts of different numbers of dims: rank 0 of the mesh {:?}, rank {other} {:?}",
                shapes[0], shapes[other]
            ),
        ));
    }
    let mut tables = Vec::new();
    let mut shape = shapes[0].clone();
    for dim in 0..dims {
        let of_dim: Vec<usize> =
            (0..placements.len()).filter(|&a| placements[a].dim() == Some(dim)).collect();
        let parts: usize = of_dim.iter().map(|&axis| mesh_shape[axis]).product();
        let mut table = vec![None; parts];
        for (index, part_shape) in shapes.iter().enumerate() {
            let at = crate::layout::coordinates(index, &mesh_shape);
            let part = of_dim.iter().fold(0, |part, &axis| part * mesh_shape[axis] + at[axis]);
            match table[part] {
                None => table[part] = Some(part_shape[dim]),
                Some(extent) if extent == part_shape[dim] => {}
                Some(extent) => {
                    return Err(argument(
                        "from_local",
                        format!(
                            "rank {index} of the mesh holds {part_shape:?}, where others of the same part have extent {extent} \
                         along dim {dim}; placements {}",
                            crate::layout::listed(placements)
                        ),
                    ));
                }
            }
        }
        let sizes: Vec<i64> = table.into_iter().flatten().collect();
        shape[dim] = sizes.iter().sum();
        if !of_dim.is_empty() {
            tables.push((dim, sizes));
        }
    }
    Layout::new(mesh, placements, &shape, &Sizes::Explicit(tables))
}

fn misfit(local: &Tensor, layout: &Layout) -> Error {
    Error::Layout {
        mesh: layout.mesh().to_string(),
        placements: crate::layout::listed(layout.placements()),
        shape: layout.shape().to_vec(),
        problem: format!(
            "the local tensor of this rank, at {:?} of the mesh, is {:?}, expected {:?}",
            layout.coordinates().unwrap_or_default(),
            local.size(),
            layout.local_shape()
        ),
    }
}

fn argument(op: &'static str, reason: String) -> Error {
    crate::dense::argument(op, reason)
}

fn failed(op: &'static str, source: tch::TchError) -> Error {
    Error::from(isobar_array::Error::Operator { op, shapes: "new tensors".into(), source })
}

/// The dtype that libtorch gives this number.
fn kind_of(number: i64) -> Option<Kind> {
    use Kind::*;
    let kinds = [
        Uint8,
        Int8,
        Int16,
        Int,
        Int64,
        Half,
        Float,
        Double,
        ComplexHalf,
        ComplexFloat,
        ComplexDouble,
        Bool,
        BFloat16,
    ];
    kinds.into_iter().find(|kind| *kind as i64 == number)
}
