//! Windows of a grid, and margins.

use isobar_array::{Array, Window, kernel};
use tch::{Kind, Tensor};

use crate::error::{Checker, Result};
use crate::layers::zeros;

/// Added to the scores of tokens that are not to see each other.
const HIDDEN: f64 = -100.0;

/// Halves of a margin of `missing` points, the odd one after.
pub(crate) fn centred(missing: i64) -> (i64, i64) {
    (missing / 2, missing - missing / 2)
}

/// Adds zeros before and after along dims, given as `(dim, (before, after))`.
pub(crate) fn pad<A: Array>(x: &A, margins: &[(usize, (i64, i64))]) -> Result<A> {
    let dims = x.shape().len();
    let Some(first) = margins.iter().filter(|(_, margin)| *margin != (0, 0)).map(|(dim, _)| *dim).min()
    else {
        return Ok(x.shallow_clone());
    };
    let mut pairs = vec![0; 2 * (dims - first)];
    for &(dim, (before, after)) in margins {
        if dim >= first {
            let at = 2 * (dims - 1 - dim);
            (pairs[at], pairs[at + 1]) = (before, after);
        }
    }
    Ok(x.pad(&pairs, 0.0)?)
}

/// Cuts the margins off along dims, given as `(dim, extent)`, so that this extent is left in the middle.
pub(crate) fn crop<A: Array>(x: &A, extents: &[(usize, i64)]) -> Result<A> {
    let mut x = x.shallow_clone();
    for &(dim, extent) in extents {
        let margin = x.extent(dim as i64)? - extent;
        if margin != 0 {
            x = x.narrow(dim as i64, centred(margin).0, extent)?;
        }
    }
    Ok(x)
}

/// Product of sizes, which is a number of elements.
pub(crate) fn product(check: &Checker, name: &str, sizes: &[i64]) -> Result<i64> {
    let product = sizes.iter().try_fold(1_i64, |product, &size| product.checked_mul(size));
    match product {
        Some(product) => Ok(product),
        None => Err(check.error(format!(
            "{name} is too large: {sizes:?} are the factors of a number of elements above 2⁶³"
        ))),
    }
}

/// Windows that cover a grid of levels, rows and columns, after it is padded by zeros to multiples of them and moved by the shift.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Extents of the grid.
    pub(crate) grid: [i64; 3],
    /// Extents of a window.
    pub(crate) window: [i64; 3],
    /// Points by which the grid moves towards its start, round the ends.
    pub(crate) shift: [i64; 3],
}

impl Windows {
    /// Numbers of windows.
    pub(crate) fn counts(&self) -> [i64; 3] {
        std::array::from_fn(|dim| (self.grid[dim] + self.window[dim] - 1) / self.window[dim])
    }

    /// Extents of the padded grid.
    pub(crate) fn padded(&self) -> [i64; 3] {
        let counts = self.counts();
        std::array::from_fn(|dim| counts[dim] * self.window[dim])
    }

    /// Number of points of a window.
    pub(crate) fn tokens(&self) -> i64 {
        self.window.iter().product()
    }

    /// Number of scores of a sample's attention with so many heads.
    pub(crate) fn scores(&self, heads: i64) -> u128 {
        let factors = [&self.counts()[..], &self.window, &self.window, &[heads]].concat();
        factors
            .into_iter()
            .fold(1, |product: u128, factor| product.saturating_mul(u128::try_from(factor).unwrap_or(0)))
    }

    /// Applies `blocks` to `[batch, levels, rows, columns, features]`. A dim with a single window is replicated meanwhile: every rank
    /// gathers its points, and computes the same window. The result is sharded like `x` again.
    pub(crate) fn within<A: Array>(&self, x: &A, blocks: impl FnOnce(A) -> Result<A>) -> Result<A> {
        let counts = self.counts();
        let single: Vec<usize> = (0..3).filter(|&dim| counts[dim] == 1).map(|dim| dim + 1).collect();
        let y = blocks(x.replicate_dims(&single)?)?;
        match counts[1..].contains(&1) {
            true => Ok(y.redistribute_like(x)?),
            false => Ok(y),
        }
    }

    /// Cuts `[batch, levels, rows, columns, features]` into windows `[batch, nz, ny, nx, tokens, features]`.
    pub(crate) fn partition<A: Array>(&self, x: &A) -> Result<A> {
        let padded = self.padded();
        let margins: Vec<_> = (0..3).map(|dim| (dim + 1, centred(padded[dim] - self.grid[dim]))).collect();
        let x = self.rolled(&pad(x, &margins)?, -1)?;
        let (shape, [nz, ny, nx], [wz, wy, wx]) = (x.shape(), self.counts(), self.window);
        let (batch, features) = (shape[0], shape[4]);
        let x = x.reshape(&[batch, nz, wz, ny, wy, nx, wx, features])?;
        let x = x.permute(&[0, 1, 3, 5, 2, 4, 6, 7])?;
        Ok(x.reshape(&[batch, nz, ny, nx, self.tokens(), features])?)
    }

    /// Puts windows together again: the inverse of [`partition`](Self::partition).
    pub(crate) fn merge<A: Array>(&self, x: &A) -> Result<A> {
        let (shape, [nz, ny, nx], [wz, wy, wx]) = (x.shape(), self.counts(), self.window);
        let (batch, features) = (shape[0], shape[5]);
        let x = x.reshape(&[batch, nz, ny, nx, wz, wy, wx, features])?;
        let x = x.permute(&[0, 1, 4, 2, 5, 3, 6, 7])?;
        let [levels, rows, columns] = self.padded();
        let x = self.rolled(&x.reshape(&[batch, levels, rows, columns, features])?, 1)?;
        crop(&x, &[(1, self.grid[0]), (2, self.grid[1]), (3, self.grid[2])])
    }

    /// Moves the grid by the shift, times `sign`, round the ends.
    pub(crate) fn rolled<A: Array>(&self, x: &A, sign: i64) -> Result<A> {
        let moved: Vec<usize> = (0..3).filter(|&dim| self.shift[dim] != 0).collect();
        if moved.is_empty() {
            return Ok(x.shallow_clone());
        }
        let shifts: Vec<i64> = moved.iter().map(|&dim| sign * self.shift[dim]).collect();
        let dims: Vec<i64> = moved.iter().map(|&dim| dim as i64 + 1).collect();
        Ok(x.roll(&shifts, &dims)?)
    }

    /// Regions of the points along a dim of the shifted grid, which were apart before the shift. With `seam`, points that came
    /// round the end are a region of their own.
    pub(crate) fn regions(&self, dim: usize, seam: bool) -> Vec<i64> {
        let (padded, window, shift) = (self.padded()[dim], self.window[dim], self.shift[dim]);
        if shift == 0 {
            return vec![0; padded as usize];
        }
        // Without a seam, the regions are those of a longer dim whose end is cut off.
        let end = if seam { padded } else { padded + shift };
        let region = |at: i64| if at >= end - shift { 2 } else { i64::from(at >= end - window) };
        (0..padded).map(region).collect()
    }

    /// Regions of the points along each dim on the earth, whose columns have no seam.
    pub(super) fn earth_regions(&self) -> [Vec<i64>; 3] {
        [self.regions(0, true), self.regions(1, true), self.regions(2, false)]
    }

    /// Shape of the mask of shifted windows in PhysicsNeMo's state dicts, `[nx, nz · ny, tokens, tokens]`.
    pub(crate) fn earth_mask_shape(&self) -> [i64; 4] {
        let [nz, ny, nx] = self.counts();
        [nx, nz * ny, self.tokens(), self.tokens()]
    }

    /// Computes the box `part` of PhysicsNeMo's mask of shifted windows, which hides regions from each other.
    pub(crate) fn earth_mask(&self, part: &Window) -> isobar_array::Result<Tensor> {
        let made = || {
            let [z, y, x] = self.earth_regions();
            let [z, y, x] = [Tensor::f_from_slice(&z)?, Tensor::f_from_slice(&y)?, Tensor::f_from_slice(&x)?];
            let z = z.f_mul_scalar(9)?.f_reshape([-1, 1, 1])?;
            let regions = z.f_add(&y.f_mul_scalar(3)?.f_reshape([-1, 1])?)?.f_add(&x)?;
            let ([nz, ny, nx], [wz, wy, wx]) = (self.counts(), self.window);
            let windows = regions.f_reshape([nz, wz, ny, wy, nx, wx])?.f_permute([4, 0, 2, 1, 3, 5])?;
            let windows = windows.f_reshape([nx, nz * ny, self.tokens()])?;
            let along = |x: &Tensor, dim: usize, from: usize| {
                x.f_narrow(dim as i64, part.offset()[from], part.shape()[from])
            };
            let windows = along(&along(&windows, 0, 0)?, 1, 1)?;
            hidden(&along(&windows, 2, 2)?, &along(&windows, 2, 3)?, Kind::Float)
        };
        kernel::named("attn_mask", &[], made())
    }

    /// Returns the masks of `dims` together, of the windows `[batch, levels, rows, columns, tokens, features]`: see
    /// [`masked`](Self::masked). `None` if there is one region along each of them.
    pub(crate) fn mask<A: Array>(
        &self,
        windows: &A,
        (dims, regions): (&[usize], &[Vec<i64>; 3]),
    ) -> Result<Option<A>> {
        if !dims.iter().any(|&dim| differ(&regions[dim])) {
            return Ok(None);
        }
        let mask = |none: &Tensor, at: &[Tensor]| self.masked(none.shallow_clone(), (dims, regions), at);
        Ok(Some(zeros(&[1; 7], windows)?.on_shards_of(windows, 4, &mask)?))
    }

    /// Adds to `bias`, which broadcasts to the scores `[batch, levels, rows, columns, heads, tokens, tokens]` of the windows `at`, the
    /// masks that hide from each other the `regions` of the points of the padded grid along each of `dims`. Together, the masks of
    /// all dims hide all regions from each other.
    pub(crate) fn masked(
        &self,
        bias: Tensor,
        (dims, regions): (&[usize], &[Vec<i64>; 3]),
        at: &[Tensor],
    ) -> isobar_array::Result<Tensor> {
        let masked = dims.iter().filter(|dim| differ(&regions[**dim])).try_fold(bias, |bias, &dim| {
            bias.f_add(&self.mask_along(dim, &regions[dim], &at[dim + 1], bias.kind())?)
        });
        kernel::named("attn_mask", &[], masked)
    }

    /// Mask of the regions along a dim in the windows `at` along it: `[1, levels, rows, columns, 1, tokens, tokens]`, where other dims
    /// than that one have extent 1.
    fn mask_along(
        &self,
        dim: usize,
        regions: &[i64],
        at: &Tensor,
        kind: Kind,
    ) -> Result<Tensor, tch::TchError> {
        let regions = Tensor::f_from_slice(regions)?.f_to(at.device())?;
        let regions = regions.f_reshape([self.counts()[dim], self.window[dim]])?.f_index_select(0, at)?;
        let ([_, wy, wx], mut along, mut windows) = (self.window, vec![1; 4], vec![1; 5]);
        (along[0], along[dim + 1], windows[dim + 1]) = (at.size()[0], self.window[dim], at.size()[0]);
        let regions = regions.f_reshape(along)?.f_expand([at.size()[0], self.window[0], wy, wx], false)?;
        let tokens = self.tokens();
        let regions = regions.f_reshape([at.size()[0], tokens])?;
        let mask = hidden(&regions, &regions, kind)?;
        windows.extend([tokens, tokens]);
        mask.f_reshape(windows)
    }
}

/// Returns whether there is more than one region.
fn differ(regions: &[i64]) -> bool {
    regions.iter().any(|region| Some(region) != regions.first())
}

/// Mask `[…, queries, keys]` of queries in regions `[…, queries]` and keys in regions `[…, keys]`.
fn hidden(queries: &Tensor, keys: &Tensor, kind: Kind) -> Result<Tensor, tch::TchError> {
    let differ = queries.f_unsqueeze(-1)?.f_ne_tensor(&keys.f_unsqueeze(-2)?)?;
    differ.f_to_kind(kind)?.f_mul_scalar(HIDDEN)
}
