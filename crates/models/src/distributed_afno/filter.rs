//! The spectral layer on the rank's groups of channels.

use isobar_array::{Array, FftNorm, Modes, Unary, in_full_precision};
use isobar_shard::{Init, Params, Placement, Scope};
use tch::Kind;

use crate::afno::filter::kept_modes;
use crate::error::Result;

const LAMBDA: f64 = 0.01;

#[derive(Debug)]
pub(super) struct Filter<A> {
    grid: [i64; 2],
    modes: Modes,
    /// `[groups, size, size, 2]` and `[groups, size, 1, 1, 2]` for each layer; the input is before the output, the real part
    /// first.
    layers: [(A, A); 2],
}

impl<A: Array> Filter<A> {
    pub(super) fn new(grid: [i64; 2], width: i64, groups: i64, params: &mut Scope<'_, A>) -> Result<Self> {
        let size = width / groups;
        let mut layer = |weight, bias| -> Result<(A, A)> {
            let small = || Init::Normal { mean: 0.0, std: 0.02 };
            let weight = params.param(weight, &[groups, size, size, 2], small(), Placement::Shard(0))?;
            Ok((weight, params.param(bias, &[groups, size, 1, 1, 2], small(), Placement::Shard(0))?))
        };
        let layers = [layer("w1", "b1")?, layer("w2", "b2")?];
        Ok(Self { grid, modes: kept_modes(grid, 1.0), layers })
    }

    /// For the rank's channels of `u` `[batch, channels, h, w]`; without the residual.
    pub(super) fn forward(&self, u: &A) -> Result<A> {
        let kind = u.kind();
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let spectrum = u.to_kind(wide)?.rfft2_modes(2, &self.modes, FftNorm::Ortho)?;
        let shape = spectrum.shape();
        let [(w1, b1), (w2, b2)] = &self.layers;
        let (groups, size) = (w1.extent(0)?, w1.extent(1)?);

        // Real and imaginary part stand beside the channel, so that a group's complex product is one real product.
        let x = spectrum.reshape(&[shape[0] * groups, 2 * size, shape[3] * shape[4]])?;
        let layer = |x: &A, weight: &A, bias: &A| -> Result<A> {
            let (weight, bias) = (weight.to_kind(wide)?, bias.to_kind(wide)?);
            in_full_precision(x.device(), || layer(x, &weight, &bias, shape[0]))
        };
        let x = layer(&layer(&x, w1, b1)?.relu()?, w2, b2)?;
        let spectrum = x.unary(Unary::Softshrink(LAMBDA))?.reshape(&shape)?;
        Ok(spectrum.irfft2_modes(2, self.grid, &self.modes, FftNorm::Ortho)?.to_kind(kind)?)
    }
}

/// w x + b for x `[batch · groups, (in, 2), points]`.
fn layer<A: Array>(x: &A, weight: &A, bias: &A, batch: i64) -> Result<A> {
    let shape = weight.shape();
    let (groups, inputs, outputs) = (shape[0], shape[1], shape[2]);
    // The complex number w as the matrix ((wᵣ, −wᵢ), (wᵢ, wᵣ)), from [groups, in, out] each.
    let (re, im) = (weight.select(3, 0)?, weight.select(3, 1)?);
    let upper = A::stack(&[&re, &im.unary(Unary::Neg)?], 3)?;
    let lower = A::stack(&[&im, &re], 3)?;
    let weight = A::stack(&[&upper, &lower], 3)?.permute(&[0, 2, 3, 1, 4])?;
    let weight = weight.reshape(&[1, groups, 2 * outputs, 2 * inputs])?;
    let bias = bias.reshape(&[1, groups, 2 * outputs, 1])?;
    let repeat = |x: &A, last: i64| {
        let all = x.expand(&[batch, groups, 2 * outputs, last])?;
        all.reshape(&[batch * groups, 2 * outputs, last])
    };
    Ok(repeat(&weight, 2 * inputs)?.batched_matmul(x, Some(&repeat(&bias, 1)?))?)
}
