//! Parameters as sharded tensors.

use std::sync::Arc;

use isobar_array::Window;
use isobar_mesh::DeviceMesh;
use isobar_torch::guard::EnableGrad;
use tch::Tensor;

use super::layouts::ParameterLayouts;
use super::{BufferValues, GradientSource, Init, ParamStore, ParameterWatch, Params, Placement};
use crate::error::{Error, Result};
use crate::layout::{Layout, Sizes};
use crate::region::ParallelRegion;
use crate::tensor::{ShardTensor, Watched};

/// The supplier of a model over [`ShardTensor`]s: the parameters of a [`ParamStore`] on a mesh.
///
/// They are replicated: each rank's store holds them in full. Backward sums their gradients over the mesh at
/// each use, so that optimizers and checkpoints treat the store as on a single rank. For training, leave the
/// gradients [`pending`](Self::pending): `fit`, `DataParallel` or `FullySharded` of `isobar_train` sum them
/// once a step, and reject gradients that backward has already summed. The store records which applies
/// ([`Parameter::gradient`](super::Parameter::gradient)). If the store is split over a
/// [region](ParamStore::with_region), its sharded parameters are split along the axis of the mesh that
/// [`along`](Self::along) names.
///
/// ```
/// use isobar_collectives::threads;
/// use isobar_mesh::DeviceMesh;
/// use isobar_array::Generator;
/// use isobar_shard::{Init, MeshParams, ParamStore, Params, Placement, ShardTensor};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
///     let mut store = ParamStore::new(Generator::new(1));
///     let mut params = MeshParams::new(&mut store, &mesh);
///     let weight = params.param("weight", &[3, 2], Init::XavierUniform, Placement::Replicate).unwrap();
///     let rows = Tensor::ones([5, 2], (Kind::Float, Device::Cpu));
///     let x = ShardTensor::distribute(&rows, &mesh, &[Placement::Shard(0)]).unwrap();
///     x.linear(&weight, None).unwrap().sum().unwrap().backward().unwrap();
///     let gradient = store.parameters()[0].tensor.grad();
///     assert_eq!(gradient, Tensor::full([3, 2], 5.0, (Kind::Float, Device::Cpu)));
/// });
/// ```
pub struct MeshParams<'a> {
    store: &'a mut ParamStore,
    mesh: DeviceMesh,
    /// The axis of the mesh over whose ranks the store is split.
    axis: Option<usize>,
    /// True if gradients stay unreduced over the mesh.
    pending: bool,
    /// Watch on the parameters.
    watch: Option<Arc<dyn ParameterWatch>>,
    /// Layouts of the parameters that are split over further axes.
    layouts: ParameterLayouts,
    /// For each pattern of `layouts`: whether a parameter has matched it.
    matched: Vec<bool>,
    /// Region that the model sees: it computes with global tensors.
    region: ParallelRegion,
}

impl<'a> MeshParams<'a> {
    /// The store's parameters, replicated on the mesh.
    pub fn new(store: &'a mut ParamStore, mesh: &DeviceMesh) -> Self {
        let region = ParallelRegion::single();
        Self {
            store,
            mesh: mesh.clone(),
            axis: None,
            pending: false,
            watch: None,
            layouts: ParameterLayouts::new(),
            matched: Vec::new(),
            region,
        }
    }

    /// Splits parameters as a declaration says, over axes of the mesh along which their gradients then need no sum. Each rank
    /// holds its box only. Parameters that the store's region splits already stay as they are.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, MeshParams, ParamStore, ParameterLayouts, Params, Placement};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let layouts = ParameterLayouts::new().with("positions", &[("domain", Placement::Shard(0))]);
    ///     let mut store = ParamStore::new(Generator::new(1));
    ///     let mut params = MeshParams::new(&mut store, &mesh).laid_out(&layouts).pending();
    ///     let all = params.param("positions", &[6, 2], Init::XavierUniform, Placement::Replicate).unwrap();
    ///     assert_eq!((all.shape(), store.parameters()[0].tensor.size()), (&[6, 2][..], vec![3, 2]));
    /// });
    /// ```
    #[must_use]
    pub fn laid_out(self, layouts: &ParameterLayouts) -> Self {
        Self { layouts: layouts.clone(), matched: vec![false; layouts.patterns().count()], ..self }
    }

    /// Returns the patterns of the declaration that no parameter has matched so far: mistakes, once the model is made.
    pub fn unmatched(&self) -> Vec<&str> {
        let patterns = self.layouts.patterns().zip(&self.matched);
        patterns.filter(|(_, matched)| !**matched).map(|(pattern, _)| pattern).collect()
    }

    /// Shards what the store's region splits along an axis of the mesh.
    ///
    /// # Errors
    ///
    /// An axis that the mesh lacks, or that has other ranks than the store's region.
    pub fn along(self, axis: &str) -> Result<Self> {
        let Some(index) = self.mesh.names().iter().position(|name| *name == axis) else {
            return Err(refuse(format!("{} has no axis \"{axis}\"", self.mesh)));
        };
        let along = self.mesh.group_along(&[index])?;
        let (ranks, split) = (along.ranks(), self.store.region().group().ranks());
        if ranks != split {
            return Err(refuse(format!(
                "the store is split over the ranks {split:?}, the axis \"{axis}\" of {} has {ranks:?}",
                self.mesh
            )));
        }
        Ok(Self { axis: Some(index), ..self })
    }

    /// Leaves gradients pending: backward puts this rank's contribution into each parameter of the store, and
    /// communicates nothing for it; the gradient is the sum of those of all ranks of the mesh, or, where the store is split
    /// [`along`](Self::along) an axis, of those along the other axes. Summed bucket by bucket while backward goes on, as
    /// `isobar_train::DataParallel` does over the group of these ranks (with a loss that is the same on all of them, so as of 1
    /// sample of 1), it costs less than one reduction for each use of a parameter. Convert the store to another dtype or device
    /// before the model is made.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, MeshParams, ParamStore, Params, Placement, ShardTensor};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let mut store = ParamStore::new(Generator::new(1));
    ///     let mut params = MeshParams::new(&mut store, &mesh).pending();
    ///     let weight = params.param("weight", &[3, 2], Init::XavierUniform, Placement::Replicate).unwrap();
    ///     let rows = Tensor::ones([5, 2], (Kind::Float, Device::Cpu));
    ///     let x = ShardTensor::distribute(&rows, &mesh, &[Placement::Shard(0)]).unwrap();
    ///     x.linear(&weight, None).unwrap().sum().unwrap().backward().unwrap();
    ///     // Of five rows, those that this rank has.
    ///     let rows = [3.0, 2.0][group.rank()];
    ///     let gradient = store.parameters()[0].tensor.grad();
    ///     assert_eq!(gradient, Tensor::full([3, 2], rows, (Kind::Float, Device::Cpu)));
    /// });
    /// ```
    #[must_use]
    pub fn pending(self) -> Self {
        Self { pending: true, ..self }
    }

    /// Adds a watch that provides the values of the parameters before operators use them. Other readers of the store's tensors
    /// must make sure that the values are there.
    #[must_use]
    pub fn watched(self, by: Arc<dyn ParameterWatch>) -> Self {
        Self { watch: Some(by), ..self }
    }

    /// The store's latest parameter, known to who watches it.
    fn noted(&self, mut parameter: ShardTensor) -> ShardTensor {
        if let Some(by) = &self.watch {
            let number = self.store.trainable().count().saturating_sub(1);
            parameter.watch(Watched { by: by.clone(), parameter: number });
        }
        parameter
    }

    /// The layout that the declaration gives a parameter, and the axes over which it is split; `None` for one that is not.
    fn declared(&self, name: &str, shape: &[i64]) -> Result<Option<(Layout, Vec<usize>)>> {
        if self.store.region().size() > 1 || self.layouts.matching(name).is_none() {
            return Ok(None);
        }
        let layout = self.layouts.layout_of(name, shape, &self.mesh)?;
        let ranks = self.mesh.shape();
        let split: Vec<usize> = layout.sharding_axes().into_iter().filter(|&axis| ranks[axis] > 1).collect();
        Ok((!split.is_empty()).then_some((layout, split)))
    }

    /// A parameter of which this rank holds a box.
    fn split_param(
        &mut self,
        name: &str,
        init: &Init<ShardTensor>,
        (layout, split): (Layout, Vec<usize>),
    ) -> Result<ShardTensor> {
        let count = split.iter().map(|&axis| self.mesh.shape()[axis]).product();
        let part = self.store.insert_shard(name, &local(init), &window(&layout)?, count)?;
        self.store.record_gradient(self.gradient().num_shards(split.clone()));
        if !self.pending {
            return Ok(self.noted(ShardTensor::from_parts(&part, &layout)?));
        }
        let axes: Vec<usize> =
            (0..self.mesh.ndim()).filter(|axis| Some(*axis) != self.axis && !split.contains(axis)).collect();
        let _grad = EnableGrad::new();
        Ok(self.noted(ShardTensor::contributed(part, layout, &axes)?))
    }

    /// Content of its parameters' gradients after backward.
    fn gradient(&self) -> GradientSource {
        let source = match self.pending {
            true => GradientSource::pending(&self.mesh),
            false => GradientSource::summed(&self.mesh),
        };
        source.along_axis(self.axis).watched(self.watch.clone())
    }

    fn layout(&self, shape: &[i64], placement: Placement) -> Result<Layout> {
        let mut placements = vec![Placement::Replicate; self.mesh.ndim()];
        let mut sizes = Sizes::Chunk;
        if let Some(dim) = placement.dim().filter(|_| self.store.region().size() > 1) {
            let Some(axis) = self.axis else {
                return Err(refuse(format!("the store is split; name an axis of {} for it", self.mesh)));
            };
            placements[axis] = placement;
            let extent = shape.get(dim).copied().unwrap_or(0);
            sizes = Sizes::Explicit([(dim, self.store.region().sizes(extent))].into());
        }
        Layout::new(&self.mesh, &placements, shape, &sizes)
    }

    fn shared(&self, part: &Tensor, shape: &[i64], placement: Placement) -> Result<ShardTensor> {
        ShardTensor::from_parts(part, &self.layout(shape, placement)?)
    }
}

/// The box of a tensor that this rank has.
fn window(layout: &Layout) -> Result<Window> {
    let mut window = Window::whole(layout.shape());
    for (dim, parts) in layout.intervals().iter().enumerate() {
        let (start, extent) = parts.first().map_or((0, 0), |part| (part.start, part.len));
        window = window.narrow(dim, start, extent)?;
    }
    Ok(window)
}

/// This rank's part of given values.
fn local(init: &Init<ShardTensor>) -> Init<Tensor> {
    init.with(|values| values.local().shallow_clone())
}

impl Params for MeshParams<'_> {
    type Array = ShardTensor;

    fn param(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<ShardTensor>,
        placement: Placement,
    ) -> Result<ShardTensor> {
        if let Some(row) = self.layouts.matching(name) {
            self.matched[row] = true;
        }
        if let Some(declared) = self.declared(name, shape)? {
            return self.split_param(name, &init, declared);
        }
        let part = self.store.param(name, shape, local(&init), placement)?;
        self.store.record_gradient(self.gradient());
        let shared = self.shared(&part, shape, placement)?;
        if !self.pending {
            return Ok(self.noted(shared));
        }
        let axes: Vec<usize> = (0..self.mesh.ndim()).filter(|axis| Some(*axis) != self.axis).collect();
        let _grad = EnableGrad::new();
        let parameter = ShardTensor::contributed(part, shared.layout().clone(), &axes)?;
        Ok(self.noted(parameter))
    }

    fn buffer(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<ShardTensor>,
        placement: Placement,
    ) -> Result<ShardTensor> {
        let part = self.store.buffer(name, shape, local(&init), placement)?;
        self.shared(&part, shape, placement)
    }

    fn computed_buffer(&mut self, name: &str, shape: &[i64], values: BufferValues) -> Result<()> {
        self.store.computed_buffer(name, shape, values)
    }

    fn draw(
        &self,
        name: &str,
        shape: &[i64],
        init: &Init<ShardTensor>,
        placement: Placement,
    ) -> Result<ShardTensor> {
        if let Some((layout, _)) = self.declared(name, shape)? {
            let part = self.store.draw_window(name, &local(init), &window(&layout)?)?;
            return ShardTensor::from_parts(&part, &layout);
        }
        let part = self.store.draw(name, shape, &local(init), placement)?;
        self.shared(&part, shape, placement)
    }

    fn tie(&mut self, alias: &str, name: &str) -> Result<()> {
        self.store.tie(alias, name)
    }

    fn region(&self) -> &ParallelRegion {
        &self.region
    }
}

fn refuse(reason: String) -> Error {
    Error::from(isobar_array::Error::Argument { op: "mesh_params", reason })
}
