//! The collectives, asynchronous and without gradients: each begins the operation and gives its [`Work`].
//!
//! The functions of the same names in the crate's root wait, and are differentiable; the meaning of the arguments is
//! told there. Every rank of the group calls, in the same order.
//!
//! ```
//! use isobar_collectives::{Group, ReduceOp, start};
//! use tch::Tensor;
//!
//! let group = Group::single();
//! let x = Tensor::from_slice(&[1.0, 2.0]);
//! let work = start::all_reduce(&x, ReduceOp::Sum, &group)?;
//! // compute something else here
//! let sum = work.wait()?;
//! assert_eq!(sum.size(), [2]);
//! # Ok::<(), isobar_collectives::Error>(())
//! ```

mod all_to_all;
mod broadcast;
pub(crate) mod fused;
mod gather;
mod indexed;
mod pair;
mod reduce;

use tch::Tensor;

use crate::engine::call::Call;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};

pub use all_to_all::{all_to_all_v, transpose};
pub use broadcast::broadcast;
pub use fused::start as fused_all_reduce;
pub use gather::{all_gather_v, gather_v, scatter_v};
pub use indexed::{indexed_all_to_all_v, indexed_scatter_add_v};
pub use pair::{recv, send};
pub use reduce::{all_reduce, reduce, reduce_scatter_v};
pub(crate) use reduce::{all_reduce_as, all_reduce_in};

/// Below so many bytes a reduction sends everything to everybody, in one step; above, parts, in two.
const SMALL: usize = 16 << 10;

/// The other ranks, beginning after this one, so that not all send to the same at once.
fn others(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (1..ranks).map(move |i| (rank + i) % ranks)
}

/// On a group of one rank the result is the tensor itself.
fn done(call: Call, tensor: &Tensor) -> Work<Tensor> {
    let tensor = tensor.detach();
    Work::start(call, async move { Ok(tensor) })
}

/// The shape and the memory format that a result has, which travels in row-major order.
struct Form {
    shape: Vec<i64>,
    like: Option<Tensor>,
}

impl Form {
    fn of(tensor: &Tensor) -> Self {
        let like = memory::is_channels_last(tensor).then(|| tensor.detach());
        Self { shape: tensor.size(), like }
    }

    fn give(&self, flat: &Tensor) -> Result<Tensor> {
        let plain = flat.f_view(self.shape.as_slice())?;
        let Some(like) = &self.like else { return Ok(plain) };
        let output = output_like(like, &self.shape)?;
        memory::copy(&output, &plain)?;
        Ok(output)
    }
}

fn with_extent(tensor: &Tensor, dim: usize, extent: i64) -> Vec<i64> {
    let mut shape = tensor.size();
    shape[dim] = extent;
    shape
}
