//! Arrays as what a rank holds of them.

use tch::Tensor;

use crate::error::Result;

/// An array taken apart into the tensor that this rank holds and what that is a part of: for code that keeps arrays between
/// passes, or gives them to libtorch.
///
/// ```
/// use isobar_array::Local;
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[1.0, 2.0]);
/// let (part, layout) = x.take_apart()?;
/// assert_eq!(Tensor::put_together(part, &layout), x);
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub trait Local: Sized {
    /// Layout of which the tensor is a shard; `()` for a dense one.
    type Layout: Send + 'static;

    /// This rank's part, with its place in the graph, and the layout. A partial array is reduced first; all ranks call.
    ///
    /// # Errors
    ///
    /// The reduction fails.
    fn take_apart(&self) -> Result<(Tensor, Self::Layout)>;

    /// Redistributes the array to the layout of another one of its shape, such as a residual to that of its input; all ranks
    /// call. A dense array is returned as it is.
    ///
    /// # Errors
    ///
    /// Shapes that differ; the exchange fails.
    fn laid_out_as(&self, other: &Self) -> Result<Self>;

    /// Returns the number of shards over these dims: 1 for a dense array.
    fn split_over(&self, dims: &[usize]) -> usize;

    /// Returns the full tensor on every rank, for use outside of the model; all ranks call. Backward takes each rank's shard of
    /// the gradient.
    ///
    /// # Errors
    ///
    /// The exchange fails.
    fn whole(&self) -> Result<Tensor>;

    /// The array of that layout whose part this rank holds as `part`, of the shape that it had.
    fn put_together(part: Tensor, layout: &Self::Layout) -> Self;
}

impl Local for Tensor {
    type Layout = ();

    fn take_apart(&self) -> Result<(Tensor, ())> {
        Ok((self.shallow_clone(), ()))
    }

    fn put_together(part: Tensor, (): &()) -> Self {
        part
    }

    fn laid_out_as(&self, _other: &Self) -> Result<Self> {
        Ok(self.shallow_clone())
    }

    fn split_over(&self, _dims: &[usize]) -> usize {
        1
    }

    fn whole(&self) -> Result<Tensor> {
        Ok(self.shallow_clone())
    }
}
