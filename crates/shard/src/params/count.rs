//! Parameter counting without allocation.

use std::ops::{Add, Mul, Sub};

use tch::{Device, Kind, Tensor};

use super::{BufferValues, Init, Params, Placement};
use crate::error::{Error, Result};
use crate::region::ParallelRegion;

/// Number of elements and tensors of a model's parameters and buffers on one rank. Arithmetic saturates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelSize {
    /// Elements of trained parameters.
    pub trained: u128,
    /// Elements of buffers.
    pub buffers: u128,
    /// Number of parameters and buffers.
    pub tensors: u128,
}

impl ModelSize {
    fn zip(self, other: Self, op: impl Fn(u128, u128) -> u128) -> Self {
        Self {
            trained: op(self.trained, other.trained),
            buffers: op(self.buffers, other.buffers),
            tensors: op(self.tensors, other.tensors),
        }
    }
}

impl Add for ModelSize {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, u128::saturating_add)
    }
}

impl Sub for ModelSize {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.zip(other, u128::saturating_sub)
    }
}

impl Mul<u128> for ModelSize {
    type Output = Self;

    fn mul(self, times: u128) -> Self {
        self.zip(Self { trained: times, buffers: times, tensors: times }, u128::saturating_mul)
    }
}

/// Supplier that counts parameters instead of allocating them: a model built from it holds empty tensors and
/// cannot run. Does not communicate.
///
/// ```
/// use isobar_shard::{Init, ParamCount, Params, Placement};
///
/// let mut count = ParamCount::default();
/// // 64 TiB of single precision, none of which is allocated.
/// count.param("weight", &[1 << 22, 1 << 22], Init::XavierUniform, Placement::Replicate)?;
/// assert_eq!(count.size().trained, 1 << 44);
/// # Ok::<(), isobar_shard::Error>(())
/// ```
#[derive(Debug)]
pub struct ParamCount {
    size: ModelSize,
    /// Ranks over which sharded parameters are split.
    split: ParallelRegion,
    /// Region that the model sees.
    region: ParallelRegion,
}

impl Default for ParamCount {
    fn default() -> Self {
        Self::new(ParallelRegion::single())
    }
}

impl ParamCount {
    /// Counts this rank's shards of parameters that are split over `region`.
    pub fn new(region: ParallelRegion) -> Self {
        Self { size: ModelSize::default(), split: region.clone(), region }
    }

    /// Counts as for a model over [`MeshParams`](super::MeshParams): sharded parameters are split over `split`, and the model
    /// computes with global tensors.
    pub fn on_mesh(split: ParallelRegion) -> Self {
        Self { size: ModelSize::default(), split, region: ParallelRegion::single() }
    }

    /// The parameters and buffers counted so far.
    pub fn size(&self) -> ModelSize {
        self.size
    }

    /// Number of elements of this rank's shard.
    fn elements(&self, name: &str, shape: &[i64], placement: Placement) -> Result<u128> {
        let mut shape = shape.to_vec();
        if let Some(dim) = placement.dim() {
            let Some(extent) = shape.get_mut(dim) else {
                let reason = format!("shape {shape:?} has no dim {dim} to shard");
                return Err(Error::Parameter { name: name.to_owned(), reason });
            };
            *extent = self.split.part(*extent).1;
        }
        let extents = shape.iter().map(|&extent| u128::try_from(extent).unwrap_or(0));
        Ok(extents.fold(1, u128::saturating_mul))
    }
}

fn empty() -> Result<Tensor> {
    let made = Tensor::f_empty([0], (Kind::Float, Device::Cpu));
    made.map_err(|source| {
        Error::from(isobar_array::Error::Operator { op: "empty", shapes: "[0]".to_owned(), source })
    })
}

impl Params for ParamCount {
    type Array = Tensor;

    fn param(
        &mut self,
        name: &str,
        shape: &[i64],
        _init: Init<Tensor>,
        placement: Placement,
    ) -> Result<Tensor> {
        let trained = self.elements(name, shape, placement)?;
        self.size = self.size + ModelSize { trained, buffers: 0, tensors: 1 };
        empty()
    }

    fn buffer(
        &mut self,
        name: &str,
        shape: &[i64],
        _init: Init<Tensor>,
        placement: Placement,
    ) -> Result<Tensor> {
        let buffers = self.elements(name, shape, placement)?;
        self.size = self.size + ModelSize { trained: 0, buffers, tensors: 1 };
        empty()
    }

    fn computed_buffer(&mut self, _: &str, _: &[i64], _: BufferValues) -> Result<()> {
        Ok(())
    }

    fn draw(&self, _: &str, _: &[i64], _: &Init<Tensor>, _: Placement) -> Result<Tensor> {
        empty()
    }

    fn tie(&mut self, _alias: &str, _name: &str) -> Result<()> {
        Ok(())
    }

    fn region(&self) -> &ParallelRegion {
        &self.region
    }
}
