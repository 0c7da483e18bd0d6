//! Operators of a region that several ranks compute together.

use isobar_array::Array;
use tch::Tensor;

use crate::error::Result;
use crate::region::ParallelRegion;

/// Mappings into and out of a [`ParallelRegion`]. Every rank of the region must call them in the same order, and every rank
/// must call backward. In a region of one rank they are the identity.
///
/// Those named `…_to_region` and `…_from_region` take or give global tensors, in which a replicated value counts once.
/// [`all_gather`](Self::all_gather) and [`reduce_scatter`](Self::reduce_scatter) are for the work between, where each rank
/// computes something else with the same array.
///
/// `sizes` are the ranks' extents along `dim`; `None` means equal parts.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: extents that do not fit `sizes`, or the communication fails"
)]
pub trait Parallel: Sized {
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

    /// [`copy_to_region`](Self::copy_to_region) of several arrays of one dtype, with a single reduction backward.
    fn copy_all_to_region(arrays: &[&Self], region: &ParallelRegion) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        if arrays.is_empty() || region.size() == 1 {
            return Ok(arrays.iter().map(|array| array.shallow_clone()).collect());
        }
        let flat: Vec<Self> =
            arrays.iter().map(|array| array.reshape(&[-1])).collect::<isobar_array::Result<_>>()?;
        let sizes: Vec<i64> =
            flat.iter().map(|array| array.extent(0)).collect::<isobar_array::Result<_>>()?;
        let joined = Self::cat(&flat.iter().collect::<Vec<_>>(), 0)?.copy_to_region(region)?;
        let parts = joined.split(&sizes, 0)?;
        parts.iter().zip(arrays).map(|(part, array)| Ok(part.reshape(&array.shape())?)).collect()
    }
}

impl Parallel for Tensor {
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

#[cfg(test)]
mod tests {
    use isobar_array::{Generator, Window};
    use tch::{Device, Kind};

    use super::*;

    fn random(seed: u64, shape: &[i64]) -> Tensor {
        let options = (Kind::Double, Device::Cpu);
        Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, options).unwrap()
    }

    #[track_caller]
    fn assert_close(got: &Tensor, want: &Tensor, tolerance: f64) {
        assert_eq!(got.size(), want.size());
        let error = (got - want).abs().max().double_value(&[]);
        assert!(error <= tolerance, "differs by {error}");
    }

    #[test]
    fn region_operators_and_their_gradients() {
        let deadline = std::time::Duration::from_secs(30);
        isobar_collectives::threads::run(3, deadline, |group| {
            let region = ParallelRegion::new(group);
            let rank = region.rank() as i64;
            let sizes = region.sizes(5);
            let whole = random(1, &[2, 5]).set_requires_grad(true);
            let cotangent = random(2, &[2, 5]);

            // In by parts, used differently by each rank, out by parts: y = Σ_r (r + 1) x.
            let part = whole.scatter_to_region(1, Some(&sizes), &region).unwrap();
            let used = Parallel::all_gather(&part, 1, Some(&sizes), &region).unwrap() * (rank + 1);
            let sum = Parallel::reduce_scatter(&used, 1, Some(&sizes), &region).unwrap();
            let y = sum.gather_from_region(1, Some(&sizes), &region).unwrap();
            assert_close(&y, &(&whole * 6), 1e-12);
            (y * &cotangent).sum(Kind::Double).backward();
            assert_close(&whole.grad(), &(&cotangent * 6), 1e-12);

            // In by copies, out by a sum, several at once.
            let weights = [random(3, &[2, 2]), random(4, &[3])].map(|weight| weight.set_requires_grad(true));
            let copies = Tensor::copy_all_to_region(&[&weights[0], &weights[1]], &region).unwrap();
            let y = (copies[0].sum(Kind::Double) + copies[1].sum(Kind::Double)) * (rank + 1);
            y.reduce_from_region(&region).unwrap().backward();
            for weight in &weights {
                assert_close(&weight.grad(), &(weight.ones_like() * 6), 0.0);
            }
        });
    }
}
