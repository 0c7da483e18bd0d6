//! Elements by their places, and orders.

use tch::{TchError, Tensor};

use super::by_name::{one, two};
use super::{Array, named};
use crate::error::Result;

/// Gathering, scattering and sorting. Dims may count from the end; indices are of dtype `Int64`.
///
/// # Errors
///
/// All methods fail alike: a dim, an extent or an index that does not exist, indices of another dtype;
/// on sharded arrays also an exchange that fails.
#[expect(clippy::missing_errors_doc, reason = "all fail alike: dims, extents or indices that do not exist")]
pub trait Index: Sized {
    /// The elements at the places along `dim` that `index` names, of its shape.
    ///
    /// ```
    /// use isobar_array::Index;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// let y = Index::gather(&x, 1, &Tensor::from_slice2(&[[1_i64], [0]]))?;
    /// assert_eq!(y, Tensor::from_slice2(&[[2.0], [3.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn gather(&self, dim: i64, index: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one("gather", &[self, index], args!("dim": dim))
    }

    /// This array plus the elements of `source` at the places along `dim` that `index` names, element by element.
    ///
    /// ```
    /// use isobar_array::Index;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let zeros = Tensor::zeros([2, 2], (Kind::Double, Device::Cpu));
    /// let index = Tensor::from_slice2(&[[0_i64, 0], [1, 0]]);
    /// let y = Index::scatter_add(&zeros, 1, &index, &Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]))?;
    /// assert_eq!(y, Tensor::from_slice2(&[[3.0, 0.0], [4.0, 3.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn scatter_add(&self, dim: i64, index: &Self, source: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one("scatter_add", &[self, index, source], args!("dim": dim))
    }

    /// The elements in order along `dim`, and where they were; equal ones keep their order.
    ///
    /// ```
    /// use isobar_array::Index;
    /// use tch::Tensor;
    ///
    /// let (values, places) = Index::sort(&Tensor::from_slice(&[3.0, 1.0, 2.0]), 0, false)?;
    /// assert_eq!(values, Tensor::from_slice(&[1.0, 2.0, 3.0]));
    /// assert_eq!(places, Tensor::from_slice(&[1_i64, 2, 0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn sort(&self, dim: i64, descending: bool) -> Result<(Self, Self)>
    where
        Self: Array,
    {
        two("sort", &[self], args!("dim": dim, "descending": descending))
    }

    /// The `k` greatest (or least) elements along `dim` in order, and where they are.
    ///
    /// ```
    /// use isobar_array::Index;
    /// use tch::Tensor;
    ///
    /// let (values, places) = Index::topk(&Tensor::from_slice(&[3.0, 9.0, 1.0, 7.0]), 2, 0, true)?;
    /// assert_eq!(values, Tensor::from_slice(&[9.0, 7.0]));
    /// assert_eq!(places, Tensor::from_slice(&[1_i64, 3]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn topk(&self, k: i64, dim: i64, largest: bool) -> Result<(Self, Self)>
    where
        Self: Array,
    {
        two("topk", &[self], args!("k": k, "dim": dim, "largest": largest))
    }
}

impl Index for Tensor {
    fn gather(&self, dim: i64, index: &Self) -> Result<Self> {
        named("gather", &[self, index], self.f_gather(dim, index, false))
    }

    fn scatter_add(&self, dim: i64, index: &Self, source: &Self) -> Result<Self> {
        let added = leading(source, index).and_then(|source| self.f_scatter_add(dim, index, &source));
        named("scatter_add", &[self, index, source], added)
    }

    fn sort(&self, dim: i64, descending: bool) -> Result<(Self, Self)> {
        named("sort", &[self], self.f_sort_stable(true, dim, descending))
    }

    fn topk(&self, k: i64, dim: i64, largest: bool) -> Result<(Self, Self)> {
        named("topk", &[self], self.f_topk(k, dim, largest, true))
    }
}

/// Returns the leading part of a source that is larger than its index: the gradient of libtorch's operator takes no other.
fn leading(source: &Tensor, index: &Tensor) -> std::result::Result<Tensor, TchError> {
    let extents = source.size().into_iter().zip(index.size());
    let mut larger = (0..).zip(extents).filter(|(_, (given, needed))| given > needed);
    larger.try_fold(source.shallow_clone(), |x, (dim, (_, needed))| x.f_narrow(dim, 0, needed))
}
