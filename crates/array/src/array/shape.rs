//! Moving elements about.

use tch::Tensor;

use super::by_name::one;
use super::{Array, Windowed, argument, named, resolve};
use crate::error::Result;
use crate::windowed::PadMode;

/// Rearrangement and selection. Dims may count from the end.
#[expect(clippy::missing_errors_doc, reason = "all fail alike: dims, extents or indices that do not exist")]
pub trait Shape: Sized {
    /// The elements, in row-major order, as another shape; one extent may be −1.
    fn reshape(&self, shape: &[i64]) -> Result<Self>;

    /// The dims in another order: dim `i` of the result is `order[i]` of this.
    fn permute(&self, order: &[i64]) -> Result<Self>;

    /// Two dims exchanged.
    fn transpose(&self, dim0: i64, dim1: i64) -> Result<Self>
    where
        Self: Array,
    {
        let dims = self.shape().len();
        let mut order: Vec<i64> = (0..dims as i64).collect();
        order.swap(resolve("transpose", dim0, dims)?, resolve("transpose", dim1, dims)?);
        self.permute(&order)
    }

    /// The elements `start, start + step, …` before `end` along `dim`; negative places count from the end, as in Python.
    fn slice(&self, dim: i64, start: Option<i64>, end: Option<i64>, step: i64) -> Result<Self>;

    /// The elements along `dim`, each an array without that dim.
    fn unbind(&self, dim: i64) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        Self::op("unbind", &[self], &args!("dim": dim)())
    }

    /// At most `chunks` parts of equal extent along `dim`, the last one shorter.
    fn chunk(&self, chunks: usize, dim: i64) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        Self::op("chunk", &[self], &args!("chunks": chunks, "dim": dim)())
    }

    /// The dims from `start` to `end` merged into one.
    fn flatten(&self, start: i64, end: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("flatten", &[self], args!("start_dim": start, "end_dim": end))
    }

    /// The dims of extent 1 dropped: those of `dims`, or all without any.
    fn squeeze(&self, dims: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        one("squeeze", &[self], args!("dim": dims))
    }

    /// Copies beside each other, so many along each dim; dims may be added in front.
    fn repeat(&self, repeats: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        one("repeat", &[self], args!("repeats": repeats))
    }

    /// Windows of `size` elements every `step` along `dim`; their elements stand along a new last dim.
    fn unfold(&self, dim: i64, size: i64, step: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("unfold", &[self], args!("dimension": dim, "size": size, "step": step))
    }

    /// `length` elements from `start` along `dim`.
    fn narrow(&self, dim: i64, start: i64, length: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("narrow", &[self], args!("dim": dim, "start": start, "length": length))
    }

    /// Parts of the given sizes along `dim`.
    fn split(&self, sizes: &[i64], dim: i64) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        Self::op("split", &[self], &args!("sizes": sizes, "dim": dim)())
    }

    /// The element `index` along `dim`, which disappears.
    fn select(&self, dim: i64, index: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("select", &[self], args!("dim": dim, "index": index))
    }

    /// The elements that `index` (`Int64`, one dim) names along `dim`.
    fn index_select(&self, dim: i64, index: &Self) -> Result<Self>;

    /// Rows of this `[count, features]` table that `indices` (`Int64`, any shape) name: `[…, features]`.
    fn embedding(&self, indices: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one("embedding", &[indices, self], args!())
    }

    /// Concatenates arrays along `dim`.
    fn cat(arrays: &[&Self], dim: i64) -> Result<Self>;

    /// Stacks arrays of one shape along a new `dim`.
    fn stack(arrays: &[&Self], dim: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("stack", arrays, args!("dim": dim))
    }

    /// Extents of 1 repeated to `shape`, without a copy.
    fn expand(&self, shape: &[i64]) -> Result<Self>;

    /// A new dim of extent 1.
    fn unsqueeze(&self, dim: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("unsqueeze", &[self], args!("dim": dim))
    }

    /// `value` before and after, as pairs from the *last* dim backwards (PyTorch's order); negative ones cut off.
    fn pad(&self, pairs: &[i64], value: f64) -> Result<Self>
    where
        Self: Array,
    {
        Windowed::pad_mode(self, pairs, PadMode::Constant, value)
    }

    /// The order of the elements along `dims` turned round.
    fn flip(&self, dims: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        one("flip", &[self], args!("dims": dims))
    }

    /// Shifts the elements by `shifts` along `dims` cyclically, as `torch.roll`.
    fn roll(&self, shifts: &[i64], dims: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        one("roll", &[self], args!("shifts": shifts, "dims": dims))
    }
}

impl Shape for Tensor {
    fn reshape(&self, shape: &[i64]) -> Result<Self> {
        named("reshape", &[self], self.f_reshape(shape))
    }

    fn permute(&self, order: &[i64]) -> Result<Self> {
        named("permute", &[self], self.f_permute(order))
    }

    fn transpose(&self, dim0: i64, dim1: i64) -> Result<Self> {
        named("transpose", &[self], self.f_transpose(dim0, dim1))
    }

    fn slice(&self, dim: i64, start: Option<i64>, end: Option<i64>, step: i64) -> Result<Self> {
        named("slice", &[self], self.f_slice(dim, start, end, step))
    }

    fn unbind(&self, dim: i64) -> Result<Vec<Self>> {
        named("unbind", &[self], self.f_unbind(dim))
    }

    fn chunk(&self, chunks: usize, dim: i64) -> Result<Vec<Self>> {
        named("chunk", &[self], self.f_chunk(chunks as i64, dim))
    }

    fn flatten(&self, start: i64, end: i64) -> Result<Self> {
        named("flatten", &[self], self.f_flatten(start, end))
    }

    fn squeeze(&self, dims: &[i64]) -> Result<Self> {
        if dims.is_empty() {
            return named("squeeze", &[self], self.f_squeeze());
        }
        let places = dims.iter().map(|&dim| resolve("squeeze", dim, self.dim()));
        let mut places = places.collect::<Result<Vec<_>>>()?;
        places.sort_unstable();
        places.dedup();
        // The last first, so that the others keep their numbers.
        let squeezed =
            places.iter().rev().try_fold(self.shallow_clone(), |x, &dim| x.f_squeeze_dim(dim as i64));
        named("squeeze", &[self], squeezed)
    }

    fn repeat(&self, repeats: &[i64]) -> Result<Self> {
        named("repeat", &[self], self.f_repeat(repeats))
    }

    fn unfold(&self, dim: i64, size: i64, step: i64) -> Result<Self> {
        named("unfold", &[self], self.f_unfold(dim, size, step))
    }

    fn narrow(&self, dim: i64, start: i64, length: i64) -> Result<Self> {
        named("narrow", &[self], self.f_narrow(dim, start, length))
    }

    fn split(&self, sizes: &[i64], dim: i64) -> Result<Vec<Self>> {
        named("split", &[self], self.f_split_with_sizes(sizes, dim))
    }

    fn select(&self, dim: i64, index: i64) -> Result<Self> {
        named("select", &[self], self.f_select(dim, index))
    }

    fn index_select(&self, dim: i64, index: &Self) -> Result<Self> {
        named("index_select", &[self, index], self.f_index_select(dim, index))
    }

    fn embedding(&self, indices: &Self) -> Result<Self> {
        named("embedding", &[self, indices], Tensor::f_embedding(self, indices, -1, false, false))
    }

    fn cat(arrays: &[&Self], dim: i64) -> Result<Self> {
        if arrays.is_empty() {
            return Err(argument("cat", "no arrays"));
        }
        named("cat", arrays, Tensor::f_cat(arrays, dim))
    }

    fn stack(arrays: &[&Self], dim: i64) -> Result<Self> {
        if arrays.is_empty() {
            return Err(argument("stack", "no arrays"));
        }
        named("stack", arrays, Tensor::f_stack(arrays, dim))
    }

    fn expand(&self, shape: &[i64]) -> Result<Self> {
        named("expand", &[self], self.f_expand(shape, false))
    }

    fn unsqueeze(&self, dim: i64) -> Result<Self> {
        named("unsqueeze", &[self], self.f_unsqueeze(dim))
    }

    fn pad(&self, pairs: &[i64], value: f64) -> Result<Self> {
        named("pad", &[self], self.f_pad(pairs, "constant", value))
    }

    fn flip(&self, dims: &[i64]) -> Result<Self> {
        named("flip", &[self], self.f_flip(dims))
    }

    fn roll(&self, shifts: &[i64], dims: &[i64]) -> Result<Self> {
        named("roll", &[self], self.f_roll(shifts, dims))
    }
}
