//! The spectral layer: a network of two layers, mode by mode, on the Fourier coefficients of the tokens.

use isobar_shard::{Array, FftNorm, Init, Modes, Params, Placement, Scope, Unary};
use tch::Kind;

use super::AfnoConfig;
use crate::error::{Checker, Result};

#[derive(Debug)]
pub(super) struct Filter<A> {
    grid: [i64; 2],
    modes: Modes,
    groups: i64,
    lambda: f64,
    /// `[2, groups, size, size]` and `[2, groups, size]` for each layer; the real part is first, the input before the output.
    layers: [(A, A); 2],
}

impl<A: Array> Filter<A> {
    /// The filter of tokens of `width` features on `grid`.
    pub(super) fn new(
        config: &AfnoConfig,
        grid: [i64; 2],
        width: i64,
        params: &mut Scope<'_, A>,
    ) -> Result<Self> {
        let groups = config.num_blocks as i64;
        let size = width / groups;
        let mut layer = |weight, bias| -> Result<(A, A)> {
            let small = || Init::Normal { mean: 0.0, std: 0.02 };
            let weight = params.param(weight, &[2, groups, size, size], small(), Placement::Replicate)?;
            Ok((weight, params.param(bias, &[2, groups, size], small(), Placement::Replicate)?))
        };
        let layers = [layer("w1", "b1")?, layer("w2", "b2")?];
        let modes = kept_modes(grid, config.hard_thresholding_fraction);
        Ok(Self { grid, modes, groups, lambda: config.sparsity_threshold, layers })
    }

    /// For `u` `[h, w, batch, features]`; without the residual.
    pub(super) fn forward(&self, u: &A) -> Result<A> {
        let kind = u.kind();
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let spectrum = u.to_kind(wide)?.rfft2_modes(0, &self.modes, FftNorm::Ortho)?;
        let shape = spectrum.shape();
        let size = shape[4] / self.groups;

        // Real and imaginary part of a group side by side, so that its complex product is one real product.
        let points = shape[1] * shape[2] * shape[3];
        let x = spectrum.reshape(&[2, points, self.groups, size])?.permute(&[2, 1, 0, 3])?;
        let x = x.reshape(&[self.groups, points, 2 * size])?;
        let [(w1, b1), (w2, b2)] = &self.layers;
        let x = x
            .batched_matmul(&real_weight(&w1.to_kind(wide)?)?, Some(&real_bias(&b1.to_kind(wide)?)?))?
            .relu()?;
        let x = x.batched_matmul(&real_weight(&w2.to_kind(wide)?)?, Some(&real_bias(&b2.to_kind(wide)?)?))?;
        let x = x.unary(Unary::Softshrink(self.lambda))?.reshape(&[self.groups, points, 2, size])?;
        let spectrum = x.permute(&[2, 1, 0, 3])?.reshape(&shape)?;
        Ok(spectrum.irfft2_modes(0, self.grid, &self.modes, FftNorm::Ortho)?.to_kind(kind)?)
    }
}

/// The modes that pass: columns are limited by the height, and rows lie around the highest frequency, as in PhysicsNeMo.
pub(crate) fn kept_modes([height, width]: [i64; 2], fraction: f64) -> Modes {
    let total = height / 2 + 1;
    let kept = (total as f64 * fraction) as i64;
    Modes { rows: (total - kept)..(total + kept).min(height), columns: 0..kept.min(width / 2 + 1) }
}

/// What all spectral layers ask of their arguments.
pub(super) fn check(check: &Checker, threshold: f64, fraction: f64) -> Result<()> {
    check.ensure(threshold >= 0.0 && threshold.is_finite(), || {
        format!("sparsity_threshold is {threshold}, expected 0 or more")
    })?;
    check.ensure((0.0..=1.0).contains(&fraction), || {
        format!("hard_thresholding_fraction is {fraction}, expected 0 to 1")
    })
}

/// From `[2, groups, in, out]` the real form of the complex weight, `[groups, 2 in, 2 out]`: (re, im) times
/// ((wᵣ, wᵢ), (−wᵢ, wᵣ)).
fn real_weight<A: Array>(weight: &A) -> Result<A> {
    let (re, im) = (weight.select(0, 0)?, weight.select(0, 1)?);
    let upper = A::cat(&[&re, &im], 2)?;
    let lower = A::cat(&[&im.unary(Unary::Neg)?, &re], 2)?;
    Ok(A::cat(&[&upper, &lower], 1)?)
}

/// From `[2, groups, out]` to `[groups, 1, 2 out]`.
fn real_bias<A: Array>(bias: &A) -> Result<A> {
    let shape = bias.shape();
    Ok(bias.transpose(0, 1)?.reshape(&[shape[1], 1, 2 * shape[2]])?)
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
        #[case] rows: std::ops::Range<i64>,
        #[case] columns: std::ops::Range<i64>,
    ) {
        assert_eq!(kept_modes(grid, fraction), Modes { rows, columns });
    }
}
