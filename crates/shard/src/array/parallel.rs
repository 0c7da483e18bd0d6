//! Operators of a region that several ranks compute together.

use tch::Tensor;

use super::Array;
use crate::error::Result;
use crate::region::ParallelRegion;

/// How an array enters and leaves a [`ParallelRegion`]. Every rank of the region calls, in the same order, and every rank
/// calls backward. In a region of one rank all of these are the identity.
///
/// The first four pair global tensors, in which a replicated value counts once. The last two are for work between: what
/// [`all_gather`](Self::all_gather) gives, each rank goes on with differently.
///
/// `sizes` are the ranks' extents along `dim`; `None` means equal parts.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: extents that do not fit `sizes`, or the communication fails"
)]
pub trait Parallel: Sized {
    /// The array in the layout of another one of its shape, where ranks have parts: what a model says where a residual goes back
    /// to where its input lies.
    fn laid_out_as(&self, other: &Self) -> Result<Self>;

    /// Among how many ranks these dims are split: 1 where each rank has them whole.
    fn split_over(&self, dims: &[usize]) -> usize;

    /// The whole of the array, on every rank: where a program goes on with it outside the model. Backward takes the own part.
    fn whole(&self) -> Result<Tensor>;

    /// In, from a replicated array to each rank's own use of it. Backward sums over ranks.
    fn copy_to_region(&self, region: &ParallelRegion) -> Result<Self>;

    /// Out, from each rank's summand to the sum on all. Backward is the identity.
    fn reduce_from_region(&self, region: &ParallelRegion) -> Result<Self>;

    /// In, from a replicated array to the rank's part along `dim`. Backward gathers.
    fn scatter_to_region(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self>;

    /// Out, from the ranks' parts along `dim` to the whole on all. Backward takes the own part.
    fn gather_from_region(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self>;

    /// Inside, from the ranks' parts along `dim` to the whole, which each rank uses for itself. Backward sums over ranks
    /// and takes the own part.
    fn all_gather(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self>;

    /// Inside, from each rank's summand to the rank's part of the sum along `dim`. Backward gathers.
    fn reduce_scatter(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self>;

    /// [`copy_to_region`](Self::copy_to_region) of several arrays of one kind, with a single reduction backward.
    fn copy_all_to_region(arrays: &[&Self], region: &ParallelRegion) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        if arrays.is_empty() || region.size() == 1 {
            return Ok(arrays.iter().map(|array| array.shallow_clone()).collect());
        }
        let flat: Vec<Self> = arrays.iter().map(|array| array.reshape(&[-1])).collect::<Result<_>>()?;
        let sizes: Vec<i64> = flat.iter().map(|array| array.extent(0)).collect::<Result<_>>()?;
        let joined = Self::cat(&flat.iter().collect::<Vec<_>>(), 0)?.copy_to_region(region)?;
        let parts = joined.split(&sizes, 0)?;
        parts.iter().zip(arrays).map(|(part, array)| part.reshape(&array.shape())).collect()
    }
}

impl Parallel for Tensor {
    fn laid_out_as(&self, _other: &Self) -> Result<Self> {
        Ok(self.shallow_clone())
    }

    fn split_over(&self, _dims: &[usize]) -> usize {
        1
    }

    fn whole(&self) -> Result<Tensor> {
        Ok(self.shallow_clone())
    }

    fn copy_to_region(&self, region: &ParallelRegion) -> Result<Self> {
        Ok(isobar_collectives::copy_to_parallel_region(self, region.group())?)
    }

    fn reduce_from_region(&self, region: &ParallelRegion) -> Result<Self> {
        Ok(isobar_collectives::reduce_from_parallel_region(self, region.group())?)
    }

    fn scatter_to_region(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        Ok(isobar_collectives::scatter_to_parallel_region(self, dim, sizes, region.group())?)
    }

    fn gather_from_region(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        Ok(isobar_collectives::gather_from_parallel_region(self, dim, sizes, region.group())?)
    }

    fn all_gather(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        if region.size() == 1 {
            return Ok(Tensor::shallow_clone(self));
        }
        Ok(isobar_collectives::all_gather_v(self, sizes, dim, true, region.group())?)
    }

    fn reduce_scatter(&self, dim: i64, sizes: Option<&[i64]>, region: &ParallelRegion) -> Result<Self> {
        if region.size() == 1 {
            return Ok(Tensor::shallow_clone(self));
        }
        let sum = isobar_collectives::ReduceOp::Sum;
        Ok(isobar_collectives::reduce_scatter_v(self, sizes, dim, sum, true, region.group())?)
    }
}
