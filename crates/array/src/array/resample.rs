//! Rearranged and resampled fields, made of the other operators, for any array.

mod rearrange;
mod sample;

use super::{Array, Attrs, argument};
use crate::error::Result;
pub use sample::{GridSample, SamplePadding};

/// Rearranging and sampling of fields, for every [`Array`]. On sharded fields, only elements that cross a shard
/// boundary and sampled points of other ranks are communicated.
pub trait Resample: Array {
    /// Splits, reorders and merges dims, as `einops.rearrange`: `"b c (h p) (w q) -> b (h w) (p q c)"`. A name is a
    /// dim; names in parentheses are one dim that merges them in row-major order. `extents` gives the extents that
    /// the shape leaves open: for each merged dim of the left side, all but one.
    ///
    /// # Errors
    ///
    /// The pattern is malformed or does not match the shape, a name is on one side only, an extent is missing or does
    /// not divide its dim, or `reshape` fails.
    ///
    /// ```
    /// use isobar_array::Resample;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([2, 3, 8, 12], (Kind::Float, Device::Cpu));
    /// let tokens = x.rearrange("b c (h p) (w q) -> b (h w) (p q c)", &[("p", 4), ("q", 4)])?;
    /// assert_eq!(tokens.size(), [2, 6, 48]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn rearrange(&self, pattern: &str, extents: &[(&str, i64)]) -> Result<Self> {
        let attrs = || {
            let extents: Attrs =
                extents.iter().map(|&(name, extent)| (name.to_owned(), extent.into())).collect();
            args!("pattern": pattern, "extents": extents)()
        };
        match Self::replaced("rearrange", &[self], attrs) {
            Some(replaced) => replaced,
            None => rearrange::rearrange(self, pattern, extents),
        }
    }

    /// Rearranges `[batch, channel · factorᵈ, extent…]` into `[batch, channel, extent · factor…]`, with d spatial
    /// dims: each point becomes a cell of factorᵈ points (Shi et al., arXiv:1609.05158). The index within the cell is
    /// the fastest part of the channel index, and within the cell the last dim is the fastest.
    ///
    /// # Errors
    ///
    /// A factor below 1, no spatial dim, channels that `factorᵈ` does not divide.
    ///
    /// ```
    /// use isobar_array::Resample;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).view([1, 4, 1, 1]);
    /// let y = Resample::pixel_shuffle(&x, 2)?;
    /// assert_eq!(y, Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]).view([1, 1, 2, 2]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn pixel_shuffle(&self, factor: i64) -> Result<Self> {
        const OP: &str = "pixel_shuffle";
        if let Some(replaced) = Self::replaced(OP, &[self], args!("upscale_factor": factor)) {
            return replaced;
        }
        let (shape, spatial) = cells(OP, &self.shape(), factor)?;
        let cell = power(OP, factor, spatial)?;
        if shape[1] % cell != 0 {
            return Err(argument(OP, format!("{} channels; expected a multiple of {cell}", shape[1])));
        }
        let split = [&[shape[0], shape[1] / cell][..], &vec![factor; spatial], &shape[2..]].concat();
        // Behind each extent its factor.
        let pairs = (0..spatial as i64).flat_map(|i| [2 + spatial as i64 + i, 2 + i]);
        let order: Vec<i64> = [0, 1].into_iter().chain(pairs).collect();
        let extents: Vec<i64> = shape[2..].iter().map(|extent| extent * factor).collect();
        self.reshape(&split)?.permute(&order)?.reshape(&[&[shape[0], shape[1] / cell], &extents[..]].concat())
    }

    /// Inverts [`pixel_shuffle`](Self::pixel_shuffle): moves the factorᵈ points of each cell into the channels of one
    /// point.
    ///
    /// # Errors
    ///
    /// A factor below 1, no spatial dim, extents that the factor does not divide.
    ///
    /// ```
    /// use isobar_array::Resample;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::rand([2, 3, 8, 12], (Kind::Float, Device::Cpu));
    /// let y = Resample::pixel_unshuffle(&x, 2)?;
    /// assert_eq!(y.size(), [2, 12, 4, 6]);
    /// assert_eq!(Resample::pixel_shuffle(&y, 2)?, x);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn pixel_unshuffle(&self, factor: i64) -> Result<Self> {
        const OP: &str = "pixel_unshuffle";
        if let Some(replaced) = Self::replaced(OP, &[self], args!("downscale_factor": factor)) {
            return replaced;
        }
        let (shape, spatial) = cells(OP, &self.shape(), factor)?;
        let cell = power(OP, factor, spatial)?;
        if let Some(extent) = shape[2..].iter().find(|extent| *extent % factor != 0) {
            return Err(argument(OP, format!("an extent of {extent}; expected a multiple of {factor}")));
        }
        let coarse: Vec<i64> = shape[2..].iter().map(|extent| extent / factor).collect();
        let split: Vec<i64> = coarse.iter().flat_map(|&extent| [extent, factor]).collect();
        let at = |place: i64| (0..spatial as i64).map(move |i| 2 + 2 * i + place);
        let order: Vec<i64> = [0, 1].into_iter().chain(at(1)).chain(at(0)).collect();
        let x = self.reshape(&[&shape[..2], &split].concat())?.permute(&order)?;
        x.reshape(&[&[shape[0], shape[1] * cell], &coarse[..]].concat())
    }

    /// Samples the field `[batch, channel, extent…]`, with d = 2 or 3 spatial dims, at the points
    /// `[batch, extent…, d]` of `grid`, as `torch.nn.functional.grid_sample`. The first coordinate of a point is
    /// along the *last* spatial dim. −1 and 1 are the ends of the field: the centres of the first and the last cell
    /// with [`align_corners`](GridSample::align_corners), otherwise their outer edges. The result
    /// `[batch, channel, extent…]` is sharded as the grid. Sampled points of other ranks are fetched from their
    /// owners.
    ///
    /// The field receives a gradient; so does the grid, with [`Interpolation::Linear`](crate::Interpolation). A field that
    /// every rank holds in full is sampled by libtorch's operator, whose gradients have no gradients.
    ///
    /// # Errors
    ///
    /// Shapes do not match, dtypes differ, or the interpolation is neither linear nor nearest.
    ///
    /// ```
    /// use isobar_array::{GridSample, Resample};
    /// use tch::Tensor;
    ///
    /// let field = Tensor::from_slice2(&[[0.0, 1.0], [2.0, 3.0]]).view([1, 1, 2, 2]);
    /// // The centre of the field, and its upper right corner: x = 1, y = −1.
    /// let grid = Tensor::from_slice2(&[[0.0, 0.0], [1.0, -1.0]]).view([1, 1, 2, 2]);
    /// let y = field.grid_sample(&grid, &GridSample { align_corners: true, ..GridSample::default() })?;
    /// assert_eq!(y, Tensor::from_slice(&[1.5, 1.0]).view([1, 1, 1, 2]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn grid_sample(&self, grid: &Self, options: &GridSample) -> Result<Self> {
        match Self::replaced("grid_sample", &[self, grid], || options.attrs()) {
            Some(replaced) => replaced,
            None => sample::grid_sample(self, grid, options),
        }
    }

    /// Returns the grid `[batch, extent…, d]` for [`grid_sample`](Self::grid_sample) that applies the affine maps
    /// `[batch, d, d + 1]` in `self`, as `torch.nn.functional.affine_grid`. The grid has the spatial dims of `field`,
    /// with their sharding.
    ///
    /// # Errors
    ///
    /// Matrices that do not fit the field.
    ///
    /// ```
    /// use isobar_array::Resample;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let field = Tensor::zeros([1, 3, 4, 6], (Kind::Double, Device::Cpu));
    /// // Mirrors the field along the width.
    /// let map = Tensor::from_slice2(&[[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).unsqueeze(0);
    /// let grid = map.affine_grid(&field, true)?;
    /// assert_eq!(grid.size(), [1, 4, 6, 2]);
    /// assert_eq!((grid.double_value(&[0, 0, 0, 0]), grid.double_value(&[0, 0, 0, 1])), (1.0, -1.0));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn affine_grid(&self, field: &Self, align_corners: bool) -> Result<Self> {
        match Self::replaced("affine_grid", &[self, field], args!("align_corners": align_corners)) {
            Some(replaced) => replaced,
            None => sample::affine_grid(self, field, align_corners),
        }
    }
}

impl<A: Array> Resample for A {}

/// Checks the arguments of the shuffles; returns the shape and the number of spatial dims.
fn cells(op: &'static str, shape: &[i64], factor: i64) -> Result<(Vec<i64>, usize)> {
    if factor < 1 {
        return Err(argument(op, format!("a factor of {factor}; expected at least 1")));
    }
    match shape.len() {
        0..3 => Err(argument(op, format!("shape {shape:?}; expected [batch, channel, extent…]"))),
        dims => Ok((shape.to_vec(), dims - 2)),
    }
}

fn power(op: &'static str, factor: i64, spatial: usize) -> Result<i64> {
    let power = u32::try_from(spatial).ok().and_then(|spatial| factor.checked_pow(spatial));
    power.ok_or_else(|| argument(op, format!("a factor of {factor} in {spatial} dims is too large")))
}
