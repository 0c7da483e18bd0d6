//! The linear maps of this crate, each with its adjoint.
//!
//! Two pairings (design decision 1). Collectives pair what each rank holds, ⟨x, y⟩ summed over ranks: there the adjoint
//! of `all_gather_v` is `reduce_scatter_v`. The four region mappings pair global tensors, in which a replicated value
//! counts once: there the adjoint of a gather is the own slice.

use std::sync::Arc;

use tch::Tensor;

use crate::collective::linear::LinearMap;
use crate::collective::start;
use crate::engine::group::Group;
use crate::error::Result;
use crate::local::memory::{copy, is_channels_last, output_like};
use crate::local::reduce::ReduceOp;
use crate::local::{memory, sizes};

/// Gathers parts along `dim` everywhere.
pub(crate) struct AllGather {
    pub(crate) group: Group,
    pub(crate) sizes: Vec<i64>,
    pub(crate) dim: i64,
    pub(crate) use_fp32: bool,
}

impl LinearMap for AllGather {
    fn name(&self) -> &'static str {
        "all_gather_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        start::all_gather_v(x, Some(&self.sizes), self.dim, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, use_fp32 } = self;
        Arc::new(ReduceScatter {
            group: group.clone(),
            sizes: sizes.clone(),
            dim: *dim,
            average: false,
            use_fp32: *use_fp32,
        })
    }
}

/// Adds up over ranks (or averages) and leaves each its part along `dim`.
pub(crate) struct ReduceScatter {
    pub(crate) group: Group,
    pub(crate) sizes: Vec<i64>,
    pub(crate) dim: i64,
    pub(crate) average: bool,
    pub(crate) use_fp32: bool,
}

impl LinearMap for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let op = if self.average { ReduceOp::Avg } else { ReduceOp::Sum };
        start::reduce_scatter_v(x, Some(&self.sizes), self.dim, op, self.use_fp32, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, average, use_fp32 } = self;
        let gather = AllGather { group: group.clone(), sizes: sizes.clone(), dim: *dim, use_fp32: *use_fp32 };
        match average {
            true => Arc::new(Scaled { by: 1.0 / group.size() as f64, map: Arc::new(gather) }),
            false => Arc::new(gather),
        }
    }
}

/// A map times a number.
struct Scaled {
    by: f64,
    map: Arc<dyn LinearMap>,
}

impl LinearMap for Scaled {
    fn name(&self) -> &'static str {
        self.map.name()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.map.forward(x)?.f_mul_scalar(self.by)?)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(Scaled { by: self.by, map: self.map.adjoint() })
    }
}

/// Gathers parts along `dim` at one rank. What the others get has the shape `elsewhere` (zeros), or else the extent 0.
pub(crate) struct Gather {
    pub(crate) group: Group,
    pub(crate) sizes: Vec<i64>,
    pub(crate) dim: i64,
    pub(crate) root: usize,
    pub(crate) elsewhere: Option<Vec<i64>>,
}

impl LinearMap for Gather {
    fn name(&self) -> &'static str {
        "gather_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gathered = start::gather_v(x, Some(&self.sizes), self.dim, self.root, &self.group)?.wait()?;
        match &self.elsewhere {
            Some(shape) if self.group.rank() != self.root => {
                Ok(Tensor::f_zeros(shape, (x.kind(), x.device()))?)
            }
            _ => Ok(gathered),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, root, .. } = self;
        let elsewhere = self.elsewhere.clone();
        Arc::new(Scatter {
            group: group.clone(),
            sizes: sizes.clone(),
            dim: *dim,
            root: *root,
            input: elsewhere,
        })
    }
}

/// Hands the parts along `dim` of one rank's tensor out. `input` is the shape that the other ranks' tensors have, where
/// it is not the extent 0.
pub(crate) struct Scatter {
    pub(crate) group: Group,
    pub(crate) sizes: Vec<i64>,
    pub(crate) dim: i64,
    pub(crate) root: usize,
    pub(crate) input: Option<Vec<i64>>,
}

impl LinearMap for Scatter {
    fn name(&self) -> &'static str {
        "scatter_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        start::scatter_v(x, Some(&self.sizes), self.dim, self.root, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim, root, .. } = self;
        let input = self.input.clone();
        Arc::new(Gather {
            group: group.clone(),
            sizes: sizes.clone(),
            dim: *dim,
            root: *root,
            elsewhere: input,
        })
    }
}

/// Exchanges parts cut along one dim and joined along another, or the same.
pub(crate) struct AllToAll {
    pub(crate) group: Group,
    pub(crate) split: (i64, Vec<i64>),
    pub(crate) concat: (i64, Vec<i64>),
}

impl LinearMap for AllToAll {
    fn name(&self) -> &'static str {
        if self.split.0 == self.concat.0 { "all_to_all_v" } else { "transpose" }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Self { group, split: (split_dim, split), concat: (concat_dim, concat) } = self;
        match split_dim == concat_dim {
            true => start::all_to_all_v(x, Some(split), Some(concat), *split_dim, group)?.wait(),
            false => start::transpose(x, *split_dim, Some(split), *concat_dim, Some(concat), group)?.wait(),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, split, concat } = self;
        Arc::new(AllToAll { group: group.clone(), split: concat.clone(), concat: split.clone() })
    }
}

/// Which rows along a dim go to which rank.
pub(crate) struct Rows {
    pub(crate) group: Group,
    pub(crate) indices: Vec<Tensor>,
    pub(crate) sizes: Vec<Vec<i64>>,
    pub(crate) extent: i64,
    pub(crate) dim: i64,
    pub(crate) use_fp32: bool,
}

/// Sends rows.
pub(crate) struct IndexedAllToAll(pub(crate) Arc<std::sync::Mutex<Rows>>);

/// Sends them back, and adds them up.
pub(crate) struct IndexedScatterAdd(pub(crate) Arc<std::sync::Mutex<Rows>>);

impl LinearMap for IndexedAllToAll {
    fn name(&self) -> &'static str {
        "indexed_all_to_all_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let work = {
            let rows = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            start::indexed_all_to_all_v(x, &rows.indices, &rows.sizes, rows.dim, &rows.group)?
        };
        work.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(IndexedScatterAdd(self.0.clone()))
    }
}

impl LinearMap for IndexedScatterAdd {
    fn name(&self) -> &'static str {
        "indexed_scatter_add_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let work = {
            let rows = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let Rows { group, indices, sizes, extent, dim, use_fp32 } = &*rows;
            start::indexed_scatter_add_v(x, indices, sizes, *extent, *dim, *use_fp32, group)?
        };
        work.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(IndexedAllToAll(self.0.clone()))
    }
}

/// The sum, or the mean, of what all ranks hold, on all of them. Its own adjoint.
pub(crate) struct AllReduce {
    pub(crate) group: Group,
    pub(crate) average: bool,
    pub(crate) use_fp32: bool,
}

impl LinearMap for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let op = if self.average { ReduceOp::Avg } else { ReduceOp::Sum };
        start::all_reduce_in(x, op, self.use_fp32, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, average, use_fp32 } = self;
        Arc::new(AllReduce { group: group.clone(), average: *average, use_fp32: *use_fp32 })
    }
}

/// The tensor of one rank, on all. The other ranks' have the same shape.
pub(crate) struct Broadcast {
    pub(crate) group: Group,
    pub(crate) root: usize,
    pub(crate) shape: Vec<i64>,
    /// True if the other ranks' tensors are empty, like the results of `reduce`.
    pub(crate) from_empty: bool,
}

impl LinearMap for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = match self.from_empty && self.group.rank() != self.root {
            true => memory::empty(&self.shape, x.kind(), x.device())?,
            false => x.shallow_clone(),
        };
        start::broadcast(&x, self.root, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, root, shape, from_empty } = self;
        let shape = shape.clone();
        Arc::new(Reduce { group: group.clone(), root: *root, average: false, shape, to_empty: *from_empty })
    }
}

/// The sum or mean of what all ranks hold, at one; zeros, or nothing, at the others.
pub(crate) struct Reduce {
    pub(crate) group: Group,
    pub(crate) root: usize,
    pub(crate) average: bool,
    pub(crate) shape: Vec<i64>,
    pub(crate) to_empty: bool,
}

impl LinearMap for Reduce {
    fn name(&self) -> &'static str {
        "reduce"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let op = if self.average { ReduceOp::Avg } else { ReduceOp::Sum };
        let reduced = start::reduce(x, op, self.root, &self.group)?.wait()?;
        match self.group.rank() != self.root && !self.to_empty {
            true => Ok(x.f_zeros_like()?),
            false => Ok(reduced),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, root, shape, average, to_empty } = self;
        let broadcast =
            Broadcast { group: group.clone(), root: *root, shape: shape.clone(), from_empty: *to_empty };
        match average {
            true => Arc::new(Scaled { by: 1.0 / group.size() as f64, map: Arc::new(broadcast) }),
            false => Arc::new(broadcast),
        }
    }
}

/// A message to one rank and one from another, where there are such.
pub(crate) struct SendReceive {
    pub(crate) group: Group,
    pub(crate) dst: Option<usize>,
    pub(crate) src: Option<usize>,
    pub(crate) sent: Vec<i64>,
    pub(crate) received: Vec<i64>,
}

impl LinearMap for SendReceive {
    fn name(&self) -> &'static str {
        "send_recv"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let out = match self.dst {
            Some(dst) => Some(start::send(x, dst, &self.group)?),
            None => None,
        };
        let received = match self.src {
            Some(src) => {
                let like = memory::empty(&self.received, x.kind(), x.device())?;
                start::recv(&like, src, &self.group)?.wait()?
            }
            None => memory::empty(&[0], x.kind(), x.device())?,
        };
        if let Some(out) = out {
            out.wait()?;
        }
        // Seen as an adjoint: a rank that sent nothing has the gradient zero.
        match (self.src, self.received.as_slice()) {
            (None, [0]) | (Some(_), _) => Ok(received),
            (None, shape) => Ok(Tensor::f_zeros(shape, (x.kind(), x.device()))?),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, dst, src, sent, received } = self;
        Arc::new(SendReceive {
            group: group.clone(),
            dst: *src,
            src: *dst,
            sent: received.clone(),
            received: sent.clone(),
        })
    }
}

/// Identity into a region where ranks go on differently; backward adds up over them.
pub(crate) struct CopyToRegion(pub(crate) Group);

/// Adds up over ranks on leaving such a region; backward is the identity.
pub(crate) struct ReduceFromRegion(pub(crate) Group);

impl LinearMap for CopyToRegion {
    fn name(&self) -> &'static str {
        "copy_to_parallel_region"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(ReduceFromRegion(self.0.clone()))
    }
}

impl LinearMap for ReduceFromRegion {
    fn name(&self) -> &'static str {
        "reduce_from_parallel_region"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        start::all_reduce(x, ReduceOp::Sum, &self.0)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(CopyToRegion(self.0.clone()))
    }
}

/// The own slice of a replicated tensor; backward gathers.
pub(crate) struct ScatterToRegion {
    pub(crate) group: Group,
    pub(crate) sizes: Vec<i64>,
    pub(crate) dim: i64,
}

/// Gathers slices into a replicated tensor; backward takes the own slice.
pub(crate) struct GatherFromRegion {
    pub(crate) group: Group,
    pub(crate) sizes: Vec<i64>,
    pub(crate) dim: i64,
}

impl LinearMap for ScatterToRegion {
    fn name(&self) -> &'static str {
        "scatter_to_parallel_region"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rank = self.group.rank();
        let part = x.f_narrow(self.dim, sizes::offsets(&self.sizes)[rank], self.sizes[rank])?;
        match is_channels_last(x) {
            true => {
                let output = output_like(x, &part.size())?;
                copy(&output, &part)?;
                Ok(output)
            }
            false => Ok(part.f_contiguous()?),
        }
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim } = self;
        Arc::new(GatherFromRegion { group: group.clone(), sizes: sizes.clone(), dim: *dim })
    }
}

impl LinearMap for GatherFromRegion {
    fn name(&self) -> &'static str {
        "gather_from_parallel_region"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        start::all_gather_v(x, Some(&self.sizes), self.dim, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim } = self;
        Arc::new(ScatterToRegion { group: group.clone(), sizes: sizes.clone(), dim: *dim })
    }
}
