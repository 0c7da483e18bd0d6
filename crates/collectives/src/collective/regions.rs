//! The four mappings in and out of a region in which ranks hold different parts of one model, after Megatron-LM
//! (Shoeybi et al. 2019, arXiv:1909.08053).
//!
//! They pair global tensors: a value that is replicated over the group counts once, so that the gradient of a
//! replicated tensor is whole on every rank, never P-fold and never a P-th. Every rank of the group calls, forward and
//! backward.

use std::sync::Arc;

use tch::Tensor;

use crate::collective::arguments::extent;
use crate::collective::linear::{LinearMap, records, run};
use crate::collective::{all_gather, all_reduce};
use crate::engine::group::Group;
use crate::error::Result;
use crate::local::memory::{copy, is_channels_last, output_like};
use crate::local::reduce::ReduceOp;
use crate::local::sizes;

/// Into a region, from a replicated tensor that the ranks use differently: identity; backward adds the gradients up.
///
/// # Errors
///
/// None forward; in backward, those of the exchange.
///
/// ```
/// use isobar_collectives::{copy_to_parallel_region, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[1.0]).set_requires_grad(true);
///     let y = copy_to_parallel_region(&x, &group).unwrap() * (group.rank() + 1) as f64;
///     y.sum(tch::Kind::Double).backward();
///     // 1 from rank 0 and 2 from rank 1, on both.
///     assert_eq!(x.grad(), Tensor::from_slice(&[3.0]));
/// });
/// ```
pub fn copy_to_parallel_region(tensor: &Tensor, group: &Group) -> Result<Tensor> {
    match group.size() == 1 || !records(tensor) {
        true => Ok(tensor.shallow_clone()),
        false => run(tensor, CopyToRegion(group.clone())),
    }
}

/// Out of a region, where each rank holds a summand: the sum, on every rank; backward is the identity. The tensor
/// itself is not changed.
///
/// # Errors
///
/// Those of the exchange.
///
/// ```
/// use isobar_collectives::{reduce_from_parallel_region, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[(group.rank() + 1) as f64]).set_requires_grad(true);
///     let sum = reduce_from_parallel_region(&x, &group).unwrap();
///     assert_eq!(sum, Tensor::from_slice(&[3.0]));
///     // The sum counts once, on however many ranks.
///     sum.sum(tch::Kind::Double).backward();
///     assert_eq!(x.grad(), Tensor::from_slice(&[1.0]));
/// });
/// ```
pub fn reduce_from_parallel_region(tensor: &Tensor, group: &Group) -> Result<Tensor> {
    if group.size() == 1 {
        return Ok(tensor.shallow_clone());
    }
    match records(tensor) {
        true => run(tensor, ReduceFromRegion(group.clone())),
        false => all_reduce::start(tensor, ReduceOp::Sum, group)?.wait(),
    }
}

/// Into a region, from a replicated tensor: the rank's slice along `dim`, of extent `sizes[rank]` (`None`: equal
/// slices); backward gathers the slices' gradients.
///
/// # Errors
///
/// Sizes or a dim that do not fit; in backward, those of the exchange.
///
/// ```
/// use isobar_collectives::{scatter_to_parallel_region, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[1.0, 2.0, 3.0]);
///     let part = scatter_to_parallel_region(&x, 0, Some(&[2, 1]), &group).unwrap();
///     let want: &[f64] = [&[1.0, 2.0][..], &[3.0]][group.rank()];
///     assert_eq!(part, Tensor::from_slice(want));
/// });
/// ```
pub fn scatter_to_parallel_region(
    tensor: &Tensor,
    dim: i64,
    sizes: Option<&[i64]>,
    group: &Group,
) -> Result<Tensor> {
    let call = group.call("scatter_to_parallel_region");
    let at = call.dim(tensor, dim)?;
    let sizes = call.parts(sizes, tensor.size()[at])?;
    match group.size() {
        1 => Ok(tensor.shallow_clone()),
        _ => run(tensor, ScatterToRegion { group: group.clone(), sizes, dim: at as i64 }),
    }
}

/// Out of a region, where each rank holds a slice of extent `sizes[rank]` along `dim` (`None`: equal slices): the whole,
/// on every rank; backward takes the rank's slice of the gradient, by the same sizes.
///
/// # Errors
///
/// Sizes, extents or a dim that do not fit; those of the exchange.
///
/// ```
/// use isobar_collectives::{gather_from_parallel_region, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[group.rank() as f64]).set_requires_grad(true);
///     let whole = gather_from_parallel_region(&x, 0, None, &group).unwrap();
///     assert_eq!(whole, Tensor::from_slice(&[0.0, 1.0]));
///     whole.sum(tch::Kind::Double).backward();
///     assert_eq!(x.grad(), Tensor::from_slice(&[1.0]));
/// });
/// ```
pub fn gather_from_parallel_region(
    tensor: &Tensor,
    dim: i64,
    sizes: Option<&[i64]>,
    group: &Group,
) -> Result<Tensor> {
    if group.size() == 1 {
        all_gather::start(tensor, sizes, dim, group)?.wait().map(drop)?;
        return Ok(tensor.shallow_clone());
    }
    // The arguments are checked by the exchange, as its own, so that ranks that wait there hear of a refusal.
    let sizes = sizes.map_or_else(|| vec![extent(tensor, dim); group.size()], <[i64]>::to_vec);
    run(tensor, GatherFromRegion { group: group.clone(), sizes, dim })
}

/// Identity into a region where ranks go on differently; backward adds up over them.
struct CopyToRegion(Group);

/// Adds up over ranks on leaving such a region; backward is the identity.
struct ReduceFromRegion(Group);

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
        all_reduce::start(x, ReduceOp::Sum, &self.0)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(CopyToRegion(self.0.clone()))
    }
}

/// The own slice of a replicated tensor; backward gathers.
struct ScatterToRegion {
    group: Group,
    sizes: Vec<i64>,
    dim: i64,
}

/// Gathers slices into a replicated tensor; backward takes the own slice.
struct GatherFromRegion {
    group: Group,
    sizes: Vec<i64>,
    dim: i64,
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
        all_gather::start(x, Some(&self.sizes), self.dim, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, sizes, dim } = self;
        Arc::new(ScatterToRegion { group: group.clone(), sizes: sizes.clone(), dim: *dim })
    }
}
