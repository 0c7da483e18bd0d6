//! The operators of sharded tensors.
//!
//! Each is a rule: from the layouts of its inputs, the same on all ranks, it finds the layout of its result and what each rank
//! needs; it brings that, and calls libtorch on the local tensors. What is local is differentiated by libtorch, what is
//! brought by the adjoint of the exchange.
//!
//! An operator depends on no model.

pub(crate) mod align;
pub(crate) mod attention;
mod by_name;
pub(crate) mod contract;
pub(crate) mod elementwise;
mod ellipsis;
pub(crate) mod fourier;
mod grouped;
pub(crate) mod index;
pub(crate) mod neighbours;
pub(crate) mod norm;
mod parameterised;
pub(crate) mod random;
pub(crate) mod reduce;
mod resample;
mod standard;
pub(crate) mod view;
pub(crate) mod windowed;

use isobar_array::Attrs;
use isobar_array::kernel::full;
use tch::{Kind, TchError, Tensor};

use crate::error::Result;
use crate::layout::{Layout, Placement};
use crate::rules;
pub(crate) use crate::rules::{Outputs, rule};
use crate::tensor::ShardTensor;

/// Runs an operator: what a program has [registered](crate::rules) under its name, which gets the arguments; else this crate's
/// rule.
pub(crate) fn operator<T: Outputs>(
    op: &str,
    inputs: &[&ShardTensor],
    args: impl FnOnce() -> Attrs,
    run: impl FnOnce() -> Result<T>,
) -> Result<T> {
    // A handler gets the arguments by name: an argument that the method omits would silently be the default.
    if cfg!(debug_assertions) && rules::is_first_call(op) {
        let args = args();
        rules::assert_arguments(op, &args);
        return replaced_or(op, inputs, || args, run);
    }
    replaced_or(op, inputs, args, run)
}

fn replaced_or<T: Outputs>(
    op: &str,
    inputs: &[&ShardTensor],
    args: impl FnOnce() -> Attrs,
    run: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match rules::replacement(op, inputs, args) {
        Some(outputs) => T::from_outputs(op, outputs?),
        None => {
            rules::check_dtypes(op, inputs)?;
            rule(op, inputs, run)
        }
    }
}

/// Converts libtorch's error of an operator on local tensors.
pub(crate) fn torch<T>(op: &'static str, result: Result<T, TchError>) -> Result<T> {
    crate::dense::named(op, &[], result)
}

/// Converts an operand to at least single precision where mixed precision is on: norms and statistics lose too much in 16 bits.
pub(crate) fn in_full(op: &'static str, x: &ShardTensor) -> Result<ShardTensor> {
    Ok(ShardTensor::new(torch(op, full(x.local()))?, x.layout().clone()))
}

/// Converts 16 bits to single precision: sums of them overflow or lose small terms.
pub(crate) fn wide(x: &Tensor) -> Result<Tensor, TchError> {
    match x.kind() {
        Kind::Half | Kind::BFloat16 => x.f_to_kind(Kind::Float),
        _ => Ok(x.shallow_clone()),
    }
}

/// An argument that an operator cannot take.
pub(crate) fn refuse<T>(op: &'static str, reason: impl Into<String>) -> Result<T> {
    Err(crate::dense::argument(op, reason))
}

/// `dim` counted from the front.
pub(crate) fn resolve(op: &'static str, dim: i64, dims: usize) -> Result<usize> {
    crate::dense::resolve(op, dim, dims)
}

impl ShardTensor {
    /// The tensor of the same layout whose parts `f` computes from the parts.
    pub(crate) fn map(
        &self,
        op: &'static str,
        args: impl FnOnce() -> Attrs,
        f: impl FnOnce(&Tensor) -> Result<Tensor, TchError>,
    ) -> Result<Self> {
        operator(op, &[self], args, || {
            let x = self.resolved()?;
            let y = crate::dense::named(op, &[x.local()], f(x.local()))?;
            Ok(Self::new(y, x.layout().clone()))
        })
    }

    /// Replicates all dims that `wanted` names.
    pub(crate) fn replicate_where(&self, wanted: impl Fn(usize) -> bool) -> Result<Self> {
        let layout = self.layout();
        if !(0..self.ndim()).any(|dim| wanted(dim) && layout.is_sharded(dim)) {
            return Ok(self.shallow_clone());
        }
        let whole = |(index, dim): (usize, &crate::layout::Dim)| match wanted(index) {
            true => crate::layout::Dim::whole(dim.extent()),
            false => dim.clone(),
        };
        self.to_layout(&layout.with_dims(layout.dims().iter().enumerate().map(whole).collect()))
    }

    /// Redistributes to consecutive shards along all dims: strided ones are chunked.
    pub(crate) fn consecutive(&self) -> Result<Self> {
        self.consecutive_along(|_| true)
    }

    /// Redistributes to consecutive shards along the dims that `wanted` names.
    pub(crate) fn consecutive_along(&self, wanted: impl Fn(usize) -> bool) -> Result<Self> {
        let layout = self.layout();
        let stays = |(index, dim): (usize, &crate::layout::Dim)| !wanted(index) || dim.is_consecutive();
        if layout.dims().iter().enumerate().all(stays) {
            return Ok(self.shallow_clone());
        }
        let plain = |placement: &Placement| match *placement {
            Placement::StridedShard { dim, .. } => Placement::Shard(dim),
            other => other,
        };
        let placements: Vec<Placement> = layout.placements().iter().map(plain).collect();
        let chunked = Layout::new(layout.mesh(), &placements, layout.shape(), &crate::layout::Sizes::Chunk)?;
        let dims = layout.dims().iter().enumerate().zip(chunked.dims());
        let dims = dims.map(|(own, chunked)| if stays(own) { own.1 } else { chunked }.clone()).collect();
        self.to_layout(&layout.with_dims(dims))
    }
}
