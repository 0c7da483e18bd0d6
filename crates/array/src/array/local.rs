//! Arrays as what a rank holds of them.

use tch::Tensor;

use super::rows::{PICK, check_picks, from_rows, rows_at};
use super::{argument, named, resolve};
use crate::error::Result;

/// Function of a replicated tensor and the global indices of a rank's shard along some dims; see [`Local::on_shards_of`].
pub type OnShard<'a> = &'a dyn Fn(&Tensor, &[Tensor]) -> Result<Tensor>;

/// An array taken apart into the tensor that this rank holds and what that is a part of: for code that keeps arrays between
/// passes, or gives them to libtorch.
///
/// ```
/// use isobar_array::Local;
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[1.0, 2.0]);
/// let (part, layout) = x.into_local()?;
/// assert_eq!(Tensor::from_local(part, &layout), x);
/// # Ok::<(), isobar_array::Error>(())
/// ```
#[expect(
    clippy::wrong_self_convention,
    reason = "an array is a handle, which this takes apart without consuming it"
)]
pub trait Local: Sized {
    /// Layout of which the tensor is a shard; `()` for a dense one.
    type Layout: Send + 'static;

    /// This rank's part, with its place in the graph, and the layout. A partial array is reduced first; all ranks call.
    ///
    /// # Errors
    ///
    /// The reduction fails.
    ///
    /// ```
    /// use isobar_array::Array;
    /// use tch::Tensor;
    ///
    /// /// Doubles an array with code for dense tensors; each rank computes on its own shard.
    /// fn doubled<A: Array>(x: &A) -> isobar_array::Result<A> {
    ///     let (part, layout) = x.into_local()?;
    ///     Ok(A::from_local(part * 2.0, &layout))
    /// }
    /// assert_eq!(doubled(&Tensor::from_slice(&[1.0, 2.0]))?, Tensor::from_slice(&[2.0, 4.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn into_local(&self) -> Result<(Tensor, Self::Layout)>;

    /// This rank's tensor as it is held, with its place in the graph, and the layout: of a partial array, the rank's summand.
    /// Communicates nothing.
    fn into_local_unreduced(&self) -> (Tensor, Self::Layout);

    /// Cuts what each rank holds along `dim` into `count` tiles of about equal extent, without communication. Which elements are
    /// in which tile depends on the layout: the tiles are for computations that treat the elements along `dim` alike, such as
    /// functions of each of them, and sums over them. [`join_tiles`](Self::join_tiles) restores the order.
    ///
    /// # Errors
    ///
    /// A dim that does not exist, or a count below 1.
    ///
    /// ```
    /// use isobar_array::Local;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0]);
    /// let tiles = x.tiles(0, 2)?;
    /// assert_eq!(tiles[0], Tensor::from_slice(&[1.0, 2.0]));
    /// assert_eq!(Tensor::join_tiles(&tiles.iter().collect::<Vec<_>>(), 0, &x)?, x);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn tiles(&self, dim: i64, count: usize) -> Result<Vec<Self>>;

    /// Joins arrays computed from the tiles of `whole` along `dim`, whose other dims may differ from those of `whole`.
    /// Communicates nothing.
    ///
    /// # Errors
    ///
    /// No arrays, or extents along `dim` other than those of the tiles.
    ///
    /// ```
    /// use isobar_array::Local;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // A function of each row, computed in tiles to save memory.
    /// let x = Tensor::ones([5, 2], (Kind::Double, Device::Cpu));
    /// let sums: Vec<Tensor> =
    ///     x.tiles(0, 2)?.iter().map(|tile| tile.sum_dim_intlist(1, true, Kind::Double)).collect();
    /// let y = Tensor::join_tiles(&sums.iter().collect::<Vec<_>>(), 0, &x)?;
    /// assert_eq!(y, Tensor::ones([5, 1], (Kind::Double, Device::Cpu)) * 2.0);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn join_tiles(tiles: &[&Self], dim: i64, whole: &Self) -> Result<Self>;

    /// Redistributes the array to the layout of another one of its shape, such as a residual to that of its input; all ranks
    /// call. A dense array is returned as it is.
    ///
    /// # Errors
    ///
    /// Shapes that differ; the exchange fails.
    fn redistribute_like(&self, other: &Self) -> Result<Self>;

    /// Gathers these dims on all ranks; other dims stay sharded. All ranks call. A dense array is returned unchanged.
    /// Meant for arrays much smaller than the fields, such as their edges.
    ///
    /// # Errors
    ///
    /// The communication fails.
    ///
    /// ```
    /// use isobar_array::Local;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0]);
    /// assert_eq!(x.replicate_dims(&[0])?, x);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn replicate_dims(&self, dims: &[usize]) -> Result<Self>;

    /// Computes an array beside `like` from this one, which is replicated and small, such as a table of biases: each rank calls
    /// `f` with this array and, for each of the first `dims` dims of `like`, the global indices (`Int64`) of its shard. The result
    /// of `f` has these dims first, each of the extent of the rank's shard or of 1, which is broadcast; the layout is that of
    /// `like`. Forward communicates nothing. Backward sums the gradients of this array over the ranks, and no others. All ranks
    /// call.
    ///
    /// # Errors
    ///
    /// More dims than `like` has; the errors of `f`, and a result that does not fit.
    ///
    /// ```
    /// use isobar_array::Local;
    /// use tch::Tensor;
    ///
    /// let (table, x) = (Tensor::from_slice(&[1.0, 2.0, 3.0]), Tensor::from_slice(&[0.0, 0.0]));
    /// let y = table.on_shards_of(&x, 1, &|table, indices| Ok(table.index_select(0, &indices[0])))?;
    /// assert_eq!(y, Tensor::from_slice(&[1.0, 2.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn on_shards_of(&self, like: &Self, dims: usize, f: OnShard<'_>) -> Result<Self>;

    /// Picks elements by their row-major numbers along the sorted `dims`. In each `(index, like)` of `wanted`, `index` (`Int64`,
    /// the extents of `like` along `dims`, the same on all ranks) gives the number of an element of this array for each element
    /// of `like`. The other dims of this array and `like` are equal. Each result has the layout of its `like`. Each rank receives
    /// only the elements that its shards are missing, in one exchange. All ranks call.
    ///
    /// # Errors
    ///
    /// Shapes or layouts that do not fit; numbers out of range; the exchange fails.
    ///
    /// ```
    /// use isobar_array::Local;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]);
    /// let like = Tensor::from_slice(&[0.0; 2]).reshape([1, 2]);
    /// let index = Tensor::from_slice(&[3_i64, 1]).reshape([1, 2]);
    /// let picked = x.pick(&[0, 1], &[(&index, &like)])?;
    /// assert_eq!(picked, [Tensor::from_slice(&[4.0, 2.0]).reshape([1, 2])]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn pick(&self, dims: &[usize], wanted: &[(&Tensor, &Self)]) -> Result<Vec<Self>>;

    /// Returns the number of shards over these dims: 1 for a dense array.
    fn num_shards(&self, dims: &[usize]) -> usize;

    /// Returns the full tensor on every rank, for use outside of the model; all ranks call. Backward takes each rank's shard of
    /// the gradient.
    ///
    /// # Errors
    ///
    /// The exchange fails.
    fn full_tensor(&self) -> Result<Tensor>;

    /// The array of that layout whose part this rank holds as `part`, of the shape that it had.
    fn from_local(part: Tensor, layout: &Self::Layout) -> Self;
}

impl Local for Tensor {
    type Layout = ();

    fn into_local(&self) -> Result<(Tensor, ())> {
        Ok((self.shallow_clone(), ()))
    }

    fn from_local(part: Tensor, (): &()) -> Self {
        part
    }

    fn into_local_unreduced(&self) -> (Tensor, ()) {
        (self.shallow_clone(), ())
    }

    fn tiles(&self, dim: i64, count: usize) -> Result<Vec<Self>> {
        let shape = self.size();
        let dim = resolve(TILES, dim, shape.len())?;
        let cuts = tile_boundaries(shape[dim], count)?;
        cuts.windows(2)
            .map(|cut| named(TILES, &[self], self.f_narrow(dim as i64, cut[0], cut[1] - cut[0])))
            .collect()
    }

    fn join_tiles(tiles: &[&Self], dim: i64, whole: &Self) -> Result<Self> {
        const OP: &str = "join_tiles";
        let Some(first) = tiles.first() else { return Err(argument(OP, "no tiles")) };
        let joined = named(OP, tiles, Tensor::f_cat(tiles, dim))?;
        let at = |x: &Tensor, dims: usize| resolve(OP, dim, dims).map(|dim| x.size()[dim]);
        let (got, want) = (at(&joined, first.dim())?, at(whole, whole.dim())?);
        match got == want {
            true => Ok(joined),
            false => Err(argument(OP, format!("tiles of {got} elements together, expected {want}"))),
        }
    }

    fn redistribute_like(&self, _other: &Self) -> Result<Self> {
        Ok(self.shallow_clone())
    }

    fn replicate_dims(&self, _dims: &[usize]) -> Result<Self> {
        Ok(self.shallow_clone())
    }

    fn on_shards_of(&self, like: &Self, dims: usize, f: OnShard<'_>) -> Result<Self> {
        const OP: &str = "on_shards_of";
        let extents = like.size();
        let Some(extents) = extents.get(..dims) else {
            return Err(argument(OP, format!("{dims} dims of {extents:?}")));
        };
        let options = (tch::Kind::Int64, Tensor::device(self));
        let indices = extents.iter().map(|&extent| named(OP, &[], Tensor::f_arange(extent, options)));
        let indices: Vec<Tensor> = indices.collect::<Result<_>>()?;
        let made = f(self, &indices)?;
        named(OP, &[&made], broadcast_to(&made, extents))
    }

    fn pick(&self, dims: &[usize], wanted: &[(&Tensor, &Self)]) -> Result<Vec<Self>> {
        let shapes: Vec<_> = wanted.iter().map(|&(index, like)| (index, like.size())).collect();
        check_picks(&self.size(), dims, &shapes)?;
        let picks = || {
            let numbers =
                wanted.iter().map(|(index, _)| index.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
            let counts: Vec<i64> = numbers.iter().map(|numbers| numbers.size()[0]).collect();
            let rows = rows_at(self, dims, &Tensor::f_cat(&numbers, 0)?)?.f_split_with_sizes(&counts, 0)?;
            rows.iter().zip(wanted).map(|(rows, (_, like))| from_rows(rows, dims, &like.size())).collect()
        };
        named(PICK, &[self], picks())
    }

    fn num_shards(&self, _dims: &[usize]) -> usize {
        1
    }

    fn full_tensor(&self) -> Result<Tensor> {
        Ok(self.shallow_clone())
    }
}

/// Broadcasts the first dims of a tensor to these extents; the others stay.
///
/// # Errors
///
/// libtorch refuses: an extent other than these and 1, or too few dims.
///
/// ```
/// use isobar_array::kernel::broadcast_to;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::zeros([1, 3, 5], (Kind::Float, Device::Cpu));
/// assert_eq!(broadcast_to(&x, &[4, 3])?.size(), [4, 3, 5]);
/// # Ok::<(), tch::TchError>(())
/// ```
pub fn broadcast_to(x: &Tensor, extents: &[i64]) -> std::result::Result<Tensor, tch::TchError> {
    let shape = x.size();
    let rest = shape.get(extents.len()..).unwrap_or_default();
    x.f_expand([extents, rest].concat(), false)
}

const TILES: &str = "tiles";

/// Boundaries of `count` tiles of a dim of this extent, one more than there are tiles.
///
/// # Errors
///
/// A count below 1.
///
/// ```
/// assert_eq!(isobar_array::kernel::tile_boundaries(10, 4)?, [0, 2, 5, 7, 10]);
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn tile_boundaries(extent: i64, count: usize) -> Result<Vec<i64>> {
    let tiles = i64::try_from(count).ok().filter(|&tiles| tiles > 0);
    let Some(tiles) = tiles else {
        return Err(argument(TILES, format!("{count} tiles, expected 1 or more")));
    };
    let cut = |index: i64| (i128::from(extent) * i128::from(index) / i128::from(tiles)) as i64;
    Ok((0..=tiles).map(cut).collect())
}
