//! Windows of a grid, and margins.

use isobar_array::{Array, kernel};
use tch::{Kind, Tensor};

use crate::error::{Checker, Result};

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
    pub(super) fn regions(&self, dim: usize, seam: bool) -> Vec<i64> {
        let (padded, window, shift) = (self.padded()[dim], self.window[dim], self.shift[dim]);
        if shift == 0 {
            return vec![0; padded as usize];
        }
        // Without a seam, the regions are those of a longer dim whose end is cut off.
        let end = if seam { padded } else { padded + shift };
        let region = |at: i64| if at >= end - shift { 2 } else { i64::from(at >= end - window) };
        (0..padded).map(region).collect()
    }

    /// Mask of shifted windows `[nx, nz · ny, tokens, tokens]` that hides regions from each other. Columns have no seam.
    pub(crate) fn earth_mask(&self) -> Result<Tensor> {
        let made = || {
            let [z, y, x] = [self.regions(0, true), self.regions(1, true), self.regions(2, false)];
            let [z, y, x] = [Tensor::f_from_slice(&z)?, Tensor::f_from_slice(&y)?, Tensor::f_from_slice(&x)?];
            let z = z.f_mul_scalar(9)?.f_reshape([-1, 1, 1])?;
            let regions = z.f_add(&y.f_mul_scalar(3)?.f_reshape([-1, 1])?)?.f_add(&x)?;
            let ([nz, ny, nx], [wz, wy, wx]) = (self.counts(), self.window);
            let windows = regions.f_reshape([nz, wz, ny, wy, nx, wx])?.f_permute([4, 0, 2, 1, 3, 5])?;
            hidden(&windows.f_reshape([nx, nz * ny, self.tokens()])?)
        };
        Ok(kernel::named("attn_mask", &[], made())?)
    }

    /// Mask of shifted windows in the rows of windows `at`, `[1, 1, rows, 1, 1, tokens, tokens]`. Together with that of the columns
    /// it hides all regions from each other.
    pub(crate) fn row_mask(&self, at: &Tensor) -> isobar_array::Result<Tensor> {
        self.mask_of_regions(1, &self.regions(1, true), at)
    }

    /// Mask of shifted windows in the columns of windows `at`, `[1, 1, 1, columns, 1, tokens, tokens]`.
    pub(crate) fn column_mask(&self, at: &Tensor) -> isobar_array::Result<Tensor> {
        self.mask_of_regions(2, &self.regions(2, true), at)
    }

    /// Mask that hides from each other the `regions` of the points of the padded grid along a dim, in the windows `at` along it:
    /// `[1, levels, rows, columns, 1, tokens, tokens]`, where other dims than that one have extent 1.
    pub(crate) fn mask_of_regions(
        &self,
        dim: usize,
        regions: &[i64],
        at: &Tensor,
    ) -> isobar_array::Result<Tensor> {
        kernel::named("attn_mask", &[], self.mask_along(dim, regions, at))
    }

    fn mask_along(&self, dim: usize, regions: &[i64], at: &Tensor) -> Result<Tensor, tch::TchError> {
        let regions = Tensor::f_from_slice(regions)?.f_to(at.device())?;
        let regions = regions.f_reshape([self.counts()[dim], self.window[dim]])?.f_index_select(0, at)?;
        let ([_, wy, wx], mut along, mut windows) = (self.window, vec![1; 4], vec![1; 5]);
        (along[0], along[dim + 1], windows[dim + 1]) = (at.size()[0], self.window[dim], at.size()[0]);
        let regions = regions.f_reshape(along)?.f_expand([at.size()[0], self.window[0], wy, wx], false)?;
        let tokens = self.tokens();
        let mask = hidden(&regions.f_reshape([at.size()[0], tokens])?)?;
        windows.extend([tokens, tokens]);
        mask.f_reshape(windows)
    }
}

/// Mask `[…, tokens, tokens]` of tokens in regions `[…, tokens]`.
fn hidden(regions: &Tensor) -> Result<Tensor, tch::TchError> {
    let differ = regions.f_unsqueeze(-1)?.f_ne_tensor(&regions.f_unsqueeze(-2)?)?;
    differ.f_to_kind(Kind::Float)?.f_mul_scalar(HIDDEN)
}
