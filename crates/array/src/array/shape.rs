//! Moving elements about.

use tch::Tensor;

use super::by_name::one;
use super::{Array, Windowed, argument, named, resolve};
use crate::error::Result;
use crate::windowed::PadMode;

/// Rearrangement and selection. Dims may count from the end.
///
/// # Errors
///
/// All methods fail alike: a dim or an index that does not exist, extents that do not fit;
/// on sharded arrays also an exchange that fails.
#[expect(clippy::missing_errors_doc, reason = "all fail alike: dims, extents or indices that do not exist")]
pub trait Shape: Sized {
    /// The elements, in row-major order, as another shape; one extent may be −1.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// let y = Shape::reshape(&x, &[2, -1])?;
    /// assert_eq!(y, Tensor::from_slice2(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn reshape(&self, shape: &[i64]) -> Result<Self>;

    /// The dims in another order: dim `i` of the result is `order[i]` of this.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // From [batch, channel, height, width] to [batch, height, width, channel].
    /// let x = Tensor::zeros([1, 3, 8, 16], (Kind::Float, Device::Cpu));
    /// assert_eq!(Shape::permute(&x, &[0, 2, 3, 1])?.size(), [1, 8, 16, 3]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn permute(&self, order: &[i64]) -> Result<Self>;

    /// Two dims exchanged.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// assert_eq!(Shape::transpose(&x, -1, -2)?, Tensor::from_slice2(&[[1.0, 3.0], [2.0, 4.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
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
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0]);
    /// // x[1:-1] and x[::2]
    /// assert_eq!(Shape::slice(&x, 0, Some(1), Some(-1), 1)?, Tensor::from_slice(&[1.0, 2.0, 3.0]));
    /// assert_eq!(Shape::slice(&x, 0, None, None, 2)?, Tensor::from_slice(&[0.0, 2.0, 4.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn slice(&self, dim: i64, start: Option<i64>, end: Option<i64>, step: i64) -> Result<Self>;

    /// The elements along `dim`, each an array without that dim.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// let columns = Shape::unbind(&x, 1)?;
    /// assert_eq!(columns[0], Tensor::from_slice(&[1.0, 3.0]));
    /// assert_eq!(columns[1], Tensor::from_slice(&[2.0, 4.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn unbind(&self, dim: i64) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        Self::op("unbind", &[self], &args!("dim": dim)())
    }

    /// At most `chunks` parts of equal extent along `dim`, the last one shorter.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([8, 5], (Kind::Float, Device::Cpu));
    /// let chunks = Shape::chunk(&x, 3, 0)?;
    /// let extents: Vec<i64> = chunks.iter().map(|chunk| chunk.size()[0]).collect();
    /// assert_eq!(extents, [3, 3, 2]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn chunk(&self, chunks: usize, dim: i64) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        Self::op("chunk", &[self], &args!("chunks": chunks, "dim": dim)())
    }

    /// The dims from `start` to `end` merged into one.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([2, 3, 8, 16], (Kind::Float, Device::Cpu));
    /// assert_eq!(Shape::flatten(&x, 2, -1)?.size(), [2, 3, 128]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn flatten(&self, start: i64, end: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("flatten", &[self], args!("start_dim": start, "end_dim": end))
    }

    /// The dims of extent 1 dropped: those of `dims`, or all without any.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([1, 3, 1], (Kind::Float, Device::Cpu));
    /// assert_eq!(Shape::squeeze(&x, &[-1])?.size(), [1, 3]);
    /// assert_eq!(Shape::squeeze(&x, &[])?.size(), [3]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn squeeze(&self, dims: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        one("squeeze", &[self], args!("dim": dims))
    }

    /// Copies beside each other, so many along each dim; dims may be added in front.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0]);
    /// let y = Shape::repeat(&x, &[2, 2])?;
    /// assert_eq!(y, Tensor::from_slice2(&[[1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 1.0, 2.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn repeat(&self, repeats: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        one("repeat", &[self], args!("repeats": repeats))
    }

    /// Windows of `size` elements every `step` along `dim`; their elements stand along a new last dim.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0]);
    /// let windows = Shape::unfold(&x, 0, 3, 2)?;
    /// assert_eq!(windows, Tensor::from_slice2(&[[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn unfold(&self, dim: i64, size: i64, step: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("unfold", &[self], args!("dimension": dim, "size": size, "step": step))
    }

    /// `length` elements from `start` along `dim`.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 1.0, 2.0, 3.0]);
    /// assert_eq!(Shape::narrow(&x, 0, 1, 2)?, Tensor::from_slice(&[1.0, 2.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn narrow(&self, dim: i64, start: i64, length: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("narrow", &[self], args!("dim": dim, "start": start, "length": length))
    }

    /// Parts of the given sizes along `dim`.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 1.0, 2.0]);
    /// let parts = Shape::split(&x, &[1, 2], 0)?;
    /// assert_eq!(parts[1], Tensor::from_slice(&[1.0, 2.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn split(&self, sizes: &[i64], dim: i64) -> Result<Vec<Self>>
    where
        Self: Array,
    {
        Self::op("split", &[self], &args!("sizes": sizes, "dim": dim)())
    }

    /// The element `index` along `dim`, which disappears.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// assert_eq!(Shape::select(&x, 1, -1)?, Tensor::from_slice(&[2.0, 4.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn select(&self, dim: i64, index: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("select", &[self], args!("dim": dim, "index": index))
    }

    /// The elements that `index` (`Int64`, one dim) names along `dim`.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[10.0, 20.0, 30.0]);
    /// let y = Shape::index_select(&x, 0, &Tensor::from_slice(&[2_i64, 0, 2]))?;
    /// assert_eq!(y, Tensor::from_slice(&[30.0, 10.0, 30.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn index_select(&self, dim: i64, index: &Self) -> Result<Self>;

    /// Rows of this `[count, features]` table that `indices` (`Int64`, any shape) name: `[…, features]`.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let table = Tensor::from_slice2(&[[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]);
    /// let y = Shape::embedding(&table, &Tensor::from_slice2(&[[2_i64, 0]]))?;
    /// assert_eq!(y.size(), [1, 2, 2]);
    /// assert_eq!(y.squeeze(), Tensor::from_slice2(&[[2.0, 2.5], [0.0, 0.5]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn embedding(&self, indices: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one("embedding", &[indices, self], args!())
    }

    /// Concatenates arrays along `dim`.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let (a, b) = (Tensor::from_slice2(&[[1.0, 2.0]]), Tensor::from_slice2(&[[3.0, 4.0]]));
    /// assert_eq!(<Tensor as Shape>::cat(&[&a, &b], 0)?, Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]));
    /// assert_eq!(<Tensor as Shape>::cat(&[&a, &b], 1)?, Tensor::from_slice2(&[[1.0, 2.0, 3.0, 4.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn cat(arrays: &[&Self], dim: i64) -> Result<Self>;

    /// Stacks arrays of one shape along a new `dim`.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let (a, b) = (Tensor::from_slice(&[1.0, 2.0]), Tensor::from_slice(&[3.0, 4.0]));
    /// assert_eq!(<Tensor as Shape>::stack(&[&a, &b], -1)?, Tensor::from_slice2(&[[1.0, 3.0], [2.0, 4.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn stack(arrays: &[&Self], dim: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("stack", arrays, args!("dim": dim))
    }

    /// Extents of 1 repeated to `shape`, without a copy.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let column = Tensor::from_slice2(&[[1.0], [2.0]]);
    /// assert_eq!(Shape::expand(&column, &[2, 3])?, Tensor::from_slice2(&[[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn expand(&self, shape: &[i64]) -> Result<Self>;

    /// A new dim of extent 1.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
    /// assert_eq!(Shape::unsqueeze(&x, 0)?.size(), [1, 3, 4]);
    /// assert_eq!(Shape::unsqueeze(&x, -1)?.size(), [3, 4, 1]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn unsqueeze(&self, dim: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("unsqueeze", &[self], args!("dim": dim))
    }

    /// `value` before and after, as pairs from the *last* dim backwards (PyTorch's order); negative ones cut off.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0]);
    /// assert_eq!(Shape::pad(&x, &[2, 1], 0.0)?, Tensor::from_slice(&[0.0, 0.0, 1.0, 2.0, 3.0, 0.0]));
    /// assert_eq!(Shape::pad(&x, &[-1, 0], 0.0)?, Tensor::from_slice(&[2.0, 3.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn pad(&self, pairs: &[i64], value: f64) -> Result<Self>
    where
        Self: Array,
    {
        Windowed::pad_mode(self, pairs, PadMode::Constant, value)
    }

    /// The order of the elements along `dims` turned round.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// assert_eq!(Shape::flip(&x, &[0])?, Tensor::from_slice2(&[[3.0, 4.0], [1.0, 2.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn flip(&self, dims: &[i64]) -> Result<Self>
    where
        Self: Array,
    {
        one("flip", &[self], args!("dims": dims))
    }

    /// Shifts the elements by `shifts` along `dims` cyclically, as `torch.roll`.
    ///
    /// ```
    /// use isobar_array::Shape;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 1.0, 2.0, 3.0]);
    /// assert_eq!(Shape::roll(&x, &[1], &[0])?, Tensor::from_slice(&[3.0, 0.0, 1.0, 2.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
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
