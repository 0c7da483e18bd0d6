//! Layouts of fields: conversion of samples to a model's inputs, plain tensors or tensors sharded over a mesh.

use std::ops::Range;

use isobar_collectives::{balanced, chunk};
use isobar_data::Augment;
use isobar_manager::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::objective::ObjectiveArray;
use crate::task::BoxError;

/// Layout of fields: the window of a batch that a rank reads, and the array that all ranks' windows form.
pub trait FieldLayout {
    /// Array type of the model.
    type Array: ObjectiveArray;

    /// Returns the mesh over which fields are sharded; `None` if each rank has full fields.
    fn mesh(&self) -> Option<&DeviceMesh> {
        None
    }

    /// Layout of targets and outputs; by default that of the inputs, which is right if they share a grid.
    fn targets(&self) -> &Self {
        self
    }

    /// The part of every field that this rank reads, a range for each spatial dim of `extents`.
    ///
    /// # Errors
    ///
    /// Extents of another number of dims than the layout is made for.
    fn window(&self, extents: &[usize]) -> Result<Vec<Range<usize>>>;

    /// Returns the samples of a batch that this rank reads.
    ///
    /// # Errors
    ///
    /// None so far.
    fn own<'a>(&self, samples: &'a [usize]) -> Result<&'a [usize]>;

    /// Number of ranks that share the samples of a batch.
    fn sharing_ranks(&self) -> usize {
        1
    }

    /// Warnings about ranks without points of the fields, one for each axis.
    fn idle_ranks(&self) -> Vec<String> {
        Vec::new()
    }

    /// The batch of `count` samples, of which `local` is this rank's window of its own, `[sample, channel, spatial…]`.
    ///
    /// # Errors
    ///
    /// A part of another shape than the rank's.
    fn array(&self, local: &Tensor, count: usize) -> Result<Self::Array>;

    /// This rank's window of its own samples of fields, `[sample, channel, spatial…]`. Communicates where they are in another layout.
    ///
    /// # Errors
    ///
    /// Fields of other extents, the errors of the communication.
    fn local(&self, fields: &Self::Array) -> Result<Tensor, BoxError>;

    /// Numbers of each sample, `[sample, feature]`, for a batch of `count` samples, of which `local` has this rank's own.
    ///
    /// # Errors
    ///
    /// Another number of samples than the rank's.
    fn per_sample(&self, local: &Tensor, count: usize) -> Result<Self::Array>;

    /// `change` of this rank's part, element by element.
    ///
    /// # Errors
    ///
    /// Those of `change`, and another shape.
    fn map(
        &self,
        array: &Self::Array,
        change: impl Fn(&Tensor) -> Result<Tensor, BoxError>,
    ) -> Result<Self::Array, BoxError>;

    /// This rank's window of its own samples, each turned as `augment` says.
    ///
    /// # Errors
    ///
    /// Those of [`Augment::apply`].
    fn augmented(
        &self,
        local: &Tensor,
        augment: (Augment, u64),
        epoch: u64,
        own: &[usize],
    ) -> Result<Tensor, BoxError>;
}

/// Whole fields: each rank has its own samples for itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct DenseFields;

impl FieldLayout for DenseFields {
    type Array = Tensor;

    fn window(&self, extents: &[usize]) -> Result<Vec<Range<usize>>> {
        Ok(extents.iter().map(|&extent| 0..extent).collect())
    }

    fn own<'a>(&self, samples: &'a [usize]) -> Result<&'a [usize]> {
        Ok(samples)
    }

    fn array(&self, local: &Tensor, _count: usize) -> Result<Tensor> {
        Ok(local.shallow_clone())
    }

    fn local(&self, fields: &Tensor) -> Result<Tensor, BoxError> {
        Ok(fields.shallow_clone())
    }

    fn per_sample(&self, local: &Tensor, _count: usize) -> Result<Tensor> {
        Ok(local.shallow_clone())
    }

    fn map(
        &self,
        array: &Tensor,
        change: impl Fn(&Tensor) -> Result<Tensor, BoxError>,
    ) -> Result<Tensor, BoxError> {
        change(array)
    }

    fn augmented(
        &self,
        local: &Tensor,
        (augment, seed): (Augment, u64),
        epoch: u64,
        own: &[usize],
    ) -> Result<Tensor, BoxError> {
        Ok(augment.apply(seed, epoch, own, local)?)
    }
}

/// Fields split over a mesh: the samples along its axes `data` and `shard`, the first three spatial dims along its axes `domain`,
/// `domain_y` and `domain_z`; along its axis `model`, over which a network's channels may be split, they are replicated. A mesh
/// has any of them.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_manager::DeviceMesh;
/// use isobar_train::{FieldLayout, ShardedFields};
/// use tch::{Device, Kind, Tensor};
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1, 1], &["data", "domain"])?;
/// let fields = ShardedFields::new(&mesh, &[64, 32])?;
/// let own = fields.own(&[3, 1, 4])?;
/// let window = fields.window(&[64, 32])?;
/// let shape = [own.len() as i64, 1, window[0].len() as i64, window[1].len() as i64];
/// let x = fields.array(&Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?, 3)?;
/// assert_eq!(x.shape(), [3, 1, 64, 32]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ShardedFields {
    mesh: DeviceMesh,
    /// The axes of the spatial dims alone.
    domain: Option<DeviceMesh>,
    extents: Vec<i64>,
    /// Sizes of the shards of spatial dims, if they are not torch.chunk's.
    sizes: Vec<(usize, Vec<i64>)>,
    /// Fields of targets and outputs, if they are on another grid.
    targets: Option<Box<Self>>,
}

/// The name of the mesh's axis over which samples are split.
pub const DATA_AXIS: &str = "data";
/// The names of the axes over which the spatial dims are split, in their order.
pub const DOMAIN_AXES: [&str; 3] = ["domain", "domain_y", "domain_z"];
/// The name of the axis over which parameters are split, and samples too.
pub const SHARD_AXIS: &str = "shard";
/// The name of the axis over which a network's channels are split.
pub const MODEL_AXIS: &str = "model";

impl ShardedFields {
    /// Fields of these spatial extents over `mesh`.
    ///
    /// # Errors
    ///
    /// A mesh of other axes; a spatial dim to split that the fields have not. Does not communicate.
    pub fn new(mesh: &DeviceMesh, extents: &[usize]) -> Result<Self> {
        for name in mesh.names() {
            let domain = &DOMAIN_AXES[..extents.len().min(3)];
            let known = [DATA_AXIS, SHARD_AXIS, MODEL_AXIS].contains(&name) || domain.contains(&name);
            if !known {
                return Err(Error::invalid(
                    format!("an axis of {mesh}"),
                    format!("\"{name}\""),
                    format!(
                        "\"{DATA_AXIS}\", \"{SHARD_AXIS}\", \"{MODEL_AXIS}\" or, for fields of {} dims, one of {domain:?}",
                        extents.len(),
                    ),
                ));
            }
        }
        let spatial: Vec<&str> = mesh.names().into_iter().filter(|name| DOMAIN_AXES.contains(name)).collect();
        let domain = match spatial.is_empty() {
            true => None,
            false => Some(mesh.slice(&spatial).map_err(isobar_shard::Error::from)?),
        };
        let extents = extents.iter().map(|&extent| extent as i64).collect();
        Ok(Self { mesh: mesh.clone(), domain, extents, sizes: Vec::new(), targets: None })
    }

    /// Puts targets and outputs on another grid, of these spatial extents. Along dims in which it is finer than that of the inputs by
    /// an integer factor, shards of both grids cover the same region, so that outputs of a refining network need no redistribution;
    /// other dims are split evenly.
    ///
    /// # Errors
    ///
    /// Another number of spatial dims than the inputs have. Does not communicate.
    pub fn with_targets(self, extents: &[usize]) -> Result<Self> {
        let extents: Vec<i64> = extents.iter().map(|&extent| extent as i64).collect();
        if extents.len() != self.extents.len() {
            return Err(Error::invalid(
                "the extents of targets",
                format!("{extents:?}"),
                format!("{} extents, as those of inputs, {:?}", self.extents.len(), self.extents),
            ));
        }
        if extents == self.extents {
            return Ok(self);
        }
        let names = self.mesh.names();
        let refined = names.iter().zip(self.mesh.shape()).filter_map(|(name, ranks)| {
            let dim = DOMAIN_AXES.iter().position(|axis| axis == name)?;
            let (from, to) = (self.extents[dim], extents[dim]);
            let factor = to.checked_div(from).filter(|factor| factor * from == to)?;
            Some((dim + 2, chunk(from, ranks).into_iter().map(|part| part * factor).collect()))
        });
        let sizes = refined.collect();
        let (mesh, domain) = (self.mesh.clone(), self.domain.clone());
        Ok(Self { targets: Some(Box::new(Self { mesh, domain, extents, sizes, targets: None })), ..self })
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Fields of these extents, `[sample, channel, spatial…]`, in this layout. Communicates where they are in another.
    pub(crate) fn laid_out(&self, fields: &ShardTensor) -> Result<ShardTensor, BoxError> {
        let shape = fields.shape();
        let known = shape.len() == self.extents.len() + 2 && shape[2..] == self.extents[..];
        let (Some((&samples, _)), true) = (shape.split_first(), known) else {
            return Err(format!("fields of shape {shape:?} are not of the extents {:?}", self.extents).into());
        };
        Ok(fields.to_layout(&self.layout(&self.mesh, samples as usize, shape[1])?)?)
    }

    fn layout(&self, mesh: &DeviceMesh, count: usize, channels: i64) -> Result<Layout> {
        let placement = |name| match DOMAIN_AXES.iter().position(|axis| *axis == name) {
            Some(dim) => Placement::Shard(dim + 2),
            None if name == DATA_AXIS || name == SHARD_AXIS => Placement::Shard(0),
            None => Placement::Replicate,
        };
        let placements: Vec<Placement> = mesh.names().into_iter().map(placement).collect();
        let shape = [&[count as i64, channels], &self.extents[..]].concat();
        let axes = mesh.shape().into_iter().zip(&placements);
        let sharing =
            axes.filter(|(_, place)| **place == Placement::Shard(0)).map(|(ranks, _)| ranks).product();
        let samples = (0, balanced(count as i64, sharing));
        let sizes = Sizes::Explicit(std::iter::once(samples).chain(self.sizes.iter().cloned()).collect());
        Ok(Layout::new(mesh, &placements, &shape, &sizes)?)
    }
}

/// Returns warnings about ranks of domain axes without any of the `of` (points, tokens) along the first spatial dims.
pub fn idle_ranks(mesh: &DeviceMesh, extents: &[usize], of: &str) -> Vec<String> {
    let names = mesh.names();
    let axes = names.iter().zip(mesh.shape());
    let idle = axes.filter_map(|(name, ranks)| {
        let dim = DOMAIN_AXES.iter().position(|axis| axis == name)?;
        idle(name, ranks, dim, *extents.get(dim)? as i64, of)
    });
    idle.collect()
}

/// Warning about ranks of an axis without any of the `extent` points, or tokens, of a dim.
fn idle(axis: &str, ranks: usize, dim: usize, extent: i64, of: &str) -> Option<String> {
    let parts = chunk(extent, ranks);
    let busy = parts.iter().filter(|&&part| part > 0).count();
    (busy < ranks).then(|| {
        format!(
            "{} of the {ranks} ranks along the axis \"{axis}\" have no rows and compute nothing: there are {extent} {of} along \
             dim {dim}; use {busy} ranks along it (--set distributed.mesh.shape=[…])",
            ranks - busy
        )
    })
}

/// The one range of a rank along a dim that is not strided.
fn range(layout: &Layout, dim: usize) -> Range<usize> {
    layout.intervals()[dim].first().map_or(0..0, |part| part.start as usize..(part.start + part.len) as usize)
}

impl FieldLayout for ShardedFields {
    type Array = ShardTensor;

    fn mesh(&self) -> Option<&DeviceMesh> {
        Some(&self.mesh)
    }

    fn targets(&self) -> &Self {
        self.targets.as_deref().unwrap_or(self)
    }

    fn window(&self, extents: &[usize]) -> Result<Vec<Range<usize>>> {
        let layout = self.layout(&self.mesh, 1, 1)?;
        if !extents.iter().map(|&extent| extent as i64).eq(self.extents.iter().copied()) {
            return Err(Error::invalid(
                "the extents of fields",
                format!("{extents:?}"),
                format!("{:?}", self.extents),
            ));
        }
        Ok((2..2 + extents.len()).map(|dim| range(&layout, dim)).collect())
    }

    fn own<'a>(&self, samples: &'a [usize]) -> Result<&'a [usize]> {
        Ok(&samples[range(&self.layout(&self.mesh, samples.len(), 1)?, 0)])
    }

    fn sharing_ranks(&self) -> usize {
        let names = self.mesh.names();
        let axes = names.iter().zip(self.mesh.shape());
        axes.filter(|(name, _)| [DATA_AXIS, SHARD_AXIS].contains(*name)).map(|(_, ranks)| ranks).product()
    }

    fn idle_ranks(&self) -> Vec<String> {
        let extents: Vec<usize> = self.extents.iter().map(|&extent| extent as usize).collect();
        idle_ranks(&self.mesh, &extents, "points")
    }

    fn array(&self, local: &Tensor, count: usize) -> Result<ShardTensor> {
        let channels = local.size().get(1).copied().unwrap_or(0);
        Ok(ShardTensor::from_parts(local, &self.layout(&self.mesh, count, channels)?)?)
    }

    fn local(&self, fields: &ShardTensor) -> Result<Tensor, BoxError> {
        Ok(self.laid_out(fields)?.local().shallow_clone())
    }

    fn per_sample(&self, local: &Tensor, count: usize) -> Result<ShardTensor> {
        let shared = |name: &str| name == DATA_AXIS || name == SHARD_AXIS;
        let names = self.mesh.names();
        let place = |name: &&str| if shared(name) { Placement::Shard(0) } else { Placement::Replicate };
        let placements: Vec<Placement> = names.iter().map(place).collect();
        let features = local.size().get(1).copied().unwrap_or(0);
        let sizes = Sizes::Explicit(vec![(0, balanced(count as i64, self.sharing_ranks()))]);
        let layout = Layout::new(&self.mesh, &placements, &[count as i64, features], &sizes)?;
        Ok(ShardTensor::from_parts(local, &layout)?)
    }

    fn map(
        &self,
        array: &ShardTensor,
        change: impl Fn(&Tensor) -> Result<Tensor, BoxError>,
    ) -> Result<ShardTensor, BoxError> {
        Ok(ShardTensor::from_parts(&change(array.local())?, array.layout())?)
    }

    fn augmented(
        &self,
        local: &Tensor,
        (augment, seed): (Augment, u64),
        epoch: u64,
        own: &[usize],
    ) -> Result<Tensor, BoxError> {
        // Ranks that share a sample turn it together; others have other samples, which turn otherwise.
        let Some(domain) = &self.domain else { return Ok(augment.apply(seed, epoch, own, local)?) };
        let channels = local.size().get(1).copied().unwrap_or(0);
        let layout = self.layout(domain, own.len(), channels)?;
        let fields = ShardTensor::from_parts(local, &layout)?;
        Ok(augment.apply(seed, epoch, own, &fields)?.to_layout(&layout)?.local().shallow_clone())
    }
}
