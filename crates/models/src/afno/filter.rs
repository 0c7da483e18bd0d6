//! The spectral layer: a network of two layers, mode by mode, on the Fourier coefficients of the tokens.

use std::ops::Range;

use isobar_array::{Array, FftNorm, Modes, Unary, in_full_precision};
use isobar_shard::{Init, Params, Placement, Scope};
use tch::Kind;

use super::scale_shift::ScaleShift;
use crate::error::{Checker, Result};

#[derive(Debug)]
pub(crate) struct Filter<A> {
    grid: [i64; 2],
    window: ModeWindow,
    groups: i64,
    lambda: f64,
    /// `[2, groups, size, size]` and `[2, groups, size]` for each layer; the real part is first, the input before the output.
    layers: [(A, A); 2],
    scale_shift: Option<ScaleShift<A>>,
}

/// Configuration of a filter.
#[derive(Debug)]
pub(crate) struct FilterConfig {
    /// Extents of the grid of tokens.
    pub(crate) grid: [i64; 2],
    pub(crate) window: ModeWindow,
    /// Features of a token.
    pub(crate) width: i64,
    pub(crate) groups: i64,
    /// Spectral coefficients are moved towards 0 by this much.
    pub(crate) lambda: f64,
}

/// The modes that pass; of all others the result is 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ModeWindow {
    /// One rectangle.
    Block(Modes),
    /// Ranges one after another, along rows and columns.
    Ranges([Vec<Range<i64>>; 2]),
}

impl ModeWindow {
    /// The lowest `fraction` of the frequencies along both dims: with K = ⌊(n / 2 + 1) · `fraction`⌋ of n modes, those below
    /// K, and of the rows also their mirror images.
    pub(crate) fn lowest([height, width]: [i64; 2], fraction: f64) -> Self {
        let kept = |extent: i64| ((extent / 2 + 1) as f64 * fraction) as i64;
        let low = kept(height);
        let mirrored = (height - low + 1).clamp(low, height)..height;
        let columns = 0..kept(width);
        Self::Ranges([vec![0..low, mirrored], vec![columns]])
    }

    /// Returns the ranges along rows and columns.
    fn ranges(&self) -> [Vec<Range<i64>>; 2] {
        match self {
            Self::Block(modes) => [vec![modes.rows.clone()], vec![modes.columns.clone()]],
            Self::Ranges(kept) => kept.clone(),
        }
    }

    /// The rectangle, where whole fields of tokens `[h, w, batch, features]` are transformed at once: on one rank, and on several
    /// where their samples or groups of features can be split in place of the grid. Else the transform is split over the modes:
    /// so each rank has work, and what is cut off does not travel.
    fn modes_of_whole<A: Array>(&self, u: &A, groups: i64) -> Option<&Modes> {
        let Self::Block(modes) = self else { return None };
        let (ranks, shape) = (u.num_shards(&[0, 1]) as i64, u.shape());
        // A dim that is sharded already is sharded further.
        let holds = |extent: i64, dim: usize| extent % (ranks * u.num_shards(&[dim]) as i64) == 0;
        let whole = holds(groups, 3) || holds(shape[2], 2);
        let travels_less = 8 * (modes.columns.end - modes.columns.start) < 3 * shape[1];
        (ranks == 1 || whole && !travels_less).then_some(modes)
    }
}

impl<A: Array> Filter<A> {
    /// Its parameters from `params`; `scale_shift` comes after the first layer.
    pub(crate) fn new(
        config: FilterConfig,
        params: &mut Scope<'_, A>,
        scale_shift: impl FnOnce(&mut Scope<'_, A>) -> Result<Option<ScaleShift<A>>>,
    ) -> Result<Self> {
        let FilterConfig { grid, window, width, groups, lambda } = config;
        let size = width / groups;
        let mut layer = |weight, bias| -> Result<(A, A)> {
            let small = || Init::Normal { mean: 0.0, std: 0.02 };
            let weight = params.param(weight, &[2, groups, size, size], small(), Placement::Replicate)?;
            Ok((weight, params.param(bias, &[2, groups, size], small(), Placement::Replicate)?))
        };
        let layers = [layer("w1", "b1")?, layer("w2", "b2")?];
        let scale_shift = scale_shift(&mut params.scope("scale_shift"))?;
        Ok(Self { grid, window, groups, lambda, layers, scale_shift })
    }

    /// For `u` `[h, w, batch, features]`, modulated by `modulation` `[batch, features]`; without the residual.
    pub(crate) fn forward(&self, u: &A, modulation: Option<&A>) -> Result<A> {
        let kind = u.kind();
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let spectrum = self.transform(&u.to_kind(wide)?)?;
        let shape = spectrum.shape();
        let (batch, groups, size) = (shape[3], self.groups, shape[4] / self.groups);
        let modes = shape[1] * shape[2];

        // Real and imaginary part of a group side by side, so that its complex product is one real product.
        let x = spectrum.reshape(&[2, modes, batch, groups, size])?.permute(&[3, 2, 1, 0, 4])?;
        let [(w1, b1), (w2, b2)] = &self.layers;
        let (w1, b1) = (parts(&w1.to_kind(wide)?)?, parts(&b1.to_kind(wide)?)?);
        // A scale and a shift of the first layer's output are a layer for each sample: nothing more to do for each mode.
        let (count, points, [w1, b1]) = match (&self.scale_shift, modulation) {
            (Some(scale_shift), Some(modulation)) => {
                let layer = scale_shift.of_layer(modulation, [w1, b1], groups, wide)?;
                (groups * batch, modes, [real_weight(&layer[0])?, real_bias(&layer[1])?])
            }
            _ => (groups, batch * modes, [real_weight(&w1)?, real_bias(&b1)?]),
        };
        let w1 = w1.reshape(&[count, 2 * size, 2 * size])?;
        let b1 = b1.reshape(&[count, 1, 2 * size])?;
        let x = x.reshape(&[count, points, 2 * size])?;
        let x = in_full_precision(x.device(), || x.batched_matmul(&w1, Some(&b1)))?.relu()?;

        let (w2, b2) = (parts(&w2.to_kind(wide)?)?, parts(&b2.to_kind(wide)?)?);
        let x = x.reshape(&[groups, batch * modes, 2 * size])?;
        let (w2, b2) = (real_weight(&w2)?, real_bias(&b2)?);
        let x = in_full_precision(x.device(), || x.batched_matmul(&w2, Some(&b2)))?;
        let x = x.unary(Unary::Softshrink(self.lambda))?.reshape(&[groups, batch, modes, 2, size])?;
        let spectrum = x.permute(&[3, 2, 1, 0, 4])?.reshape(&shape)?;
        Ok(self.transform_back(&spectrum, u)?.to_kind(kind)?)
    }

    /// From `[h, w, batch, features]` to `[2, …, batch, features]`, with rows and columns of modes between.
    fn transform(&self, u: &A) -> Result<A> {
        Ok(match self.window.modes_of_whole(u, self.groups) {
            Some(modes) => u.rfft2_modes(0, modes, FftNorm::Ortho)?,
            // Columns first: where they are split, each rank has some whole ones.
            None => {
                let kept = self.window.ranges();
                u.rfftn_modes(&[0, 1], &kept, FftNorm::Ortho)?.view_as_real()?.permute(&[4, 1, 0, 2, 3])?
            }
        })
    }

    /// Back to where `u` lies.
    fn transform_back(&self, spectrum: &A, u: &A) -> Result<A> {
        Ok(match self.window.modes_of_whole(u, self.groups) {
            Some(modes) => {
                spectrum.irfft2_modes(0, self.grid, modes, FftNorm::Ortho)?.redistribute_like(u)?
            }
            None => {
                let pairs = spectrum.permute(&[2, 1, 3, 4, 0])?.view_as_complex()?;
                pairs.irfftn_modes_as(u, &[0, 1], &self.window.ranges(), FftNorm::Ortho)?
            }
        })
    }
}

/// The modes that pass in AFNO: columns are limited by the height.
pub(crate) fn kept_modes(grid: [i64; 2], fraction: f64) -> Modes {
    modes_around(grid, grid[0] / 2 + 1, fraction)
}

/// PhysicsNeMo's window: K = ⌊`total` · `fraction`⌋ columns, limited by the same `total` as the rows, which lie within K of
/// `total`, around the highest frequency.
pub(crate) fn modes_around([height, width]: [i64; 2], total: i64, fraction: f64) -> Modes {
    let kept = (total as f64 * fraction) as i64;
    Modes { rows: (total - kept)..(total + kept).min(height), columns: 0..kept.min(width / 2 + 1) }
}

/// Checks the arguments common to all spectral layers.
pub(crate) fn check(check: &Checker, threshold: f64, fraction: f64) -> Result<()> {
    check.ensure(threshold >= 0.0 && threshold.is_finite(), || {
        format!("sparsity_threshold is {threshold}, expected 0 or more")
    })?;
    check.ensure((0.0..=1.0).contains(&fraction), || {
        format!("hard_thresholding_fraction is {fraction}, expected 0 to 1")
    })
}

/// Real and imaginary part, from `[2, …]`.
fn parts<A: Array>(pairs: &A) -> Result<[A; 2]> {
    Ok([pairs.select(0, 0)?, pairs.select(0, 1)?])
}

/// From `[…, in, out]` each the real form of the complex weight, `[…, 2 in, 2 out]`: (re, im) times ((wᵣ, wᵢ), (−wᵢ, wᵣ)).
fn real_weight<A: Array>([re, im]: &[A; 2]) -> Result<A> {
    let upper = A::cat(&[re, im], -1)?;
    let lower = A::cat(&[&im.unary(Unary::Neg)?, re], -1)?;
    Ok(A::cat(&[&upper, &lower], -2)?)
}

/// From `[…, out]` each to `[…, 1, 2 out]`.
fn real_bias<A: Array>([re, im]: &[A; 2]) -> Result<A> {
    Ok(A::cat(&[re, im], -1)?.unsqueeze(-2)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::all([6, 8], 1.0, 0..6, 0..4)]
    #[case::wide([4, 16], 1.0, 0..4, 0..3)]
    #[case::tall([16, 4], 1.0, 0..16, 0..3)]
    #[case::some([10, 6], 0.4, 4..8, 0..2)]
    #[case::odd([7, 9], 0.5, 2..6, 0..2)]
    #[case::none([4, 4], 0.0, 3..3, 0..0)]
    fn windows(
        #[case] grid: [i64; 2],
        #[case] fraction: f64,
        #[case] rows: Range<i64>,
        #[case] columns: Range<i64>,
    ) {
        assert_eq!(kept_modes(grid, fraction), Modes { rows, columns });
    }

    #[rstest]
    #[case::all([6, 8], 1.0, [0..4, 4..6], 0..5)]
    #[case::odd([7, 9], 1.0, [0..4, 4..7], 0..5)]
    #[case::wide([4, 16], 1.0, [0..3, 3..4], 0..9)]
    #[case::some([10, 6], 0.5, [0..3, 8..10], 0..2)]
    #[case::mean([10, 6], 0.25, [0..1, 10..10], 0..1)]
    #[case::none([4, 4], 0.0, [0..0, 4..4], 0..0)]
    #[case::one([1, 1], 1.0, [0..1, 1..1], 0..1)]
    fn lowest(
        #[case] grid: [i64; 2],
        #[case] fraction: f64,
        #[case] rows: [Range<i64>; 2],
        #[case] columns: Range<i64>,
    ) {
        let columns = vec![columns];
        assert_eq!(ModeWindow::lowest(grid, fraction), ModeWindow::Ranges([rows.to_vec(), columns]));
    }
}
