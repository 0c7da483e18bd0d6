//! Arrays as what a rank holds of them.

use tch::Tensor;

use crate::error::Result;

/// An array taken apart into the tensor that this rank holds and what that is a part of: for code that keeps arrays between
/// passes, or gives them to libtorch.
///
/// ```
/// use isobar_shard::Local;
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[1.0, 2.0]);
/// let (part, layout) = x.take_apart()?;
/// assert_eq!(Tensor::put_together(part, &layout), x);
/// # Ok::<(), isobar_shard::Error>(())
/// ```
pub trait Local: Sized {
    /// What the tensor is a part of: nothing, for a dense one.
    type Layout: Send + 'static;

    /// This rank's part, with its place in the graph, and the layout. A partial array is reduced first; all ranks call.
    ///
    /// # Errors
    ///
    /// The reduction fails.
    fn take_apart(&self) -> Result<(Tensor, Self::Layout)>;

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
}
