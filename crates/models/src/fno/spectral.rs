//! The spectral convolution: the lowest modes, each mixed by its own matrix.

use std::ops::Range;

use isobar_array::{Array, FftNorm, in_full_precision};
use isobar_shard::Scope;
use tch::Kind;

use super::config::{Factorization, Sizes};
use super::weight::SpectralWeight;
use crate::error::Result;

#[derive(Debug)]
pub(super) struct SpectralConv<A> {
    modes: Vec<i64>,
    /// One for each corner, see [`place`].
    weights: Vec<SpectralWeight<A>>,
}

impl<A: Array> SpectralConv<A> {
    pub(super) fn new(
        sizes: &Sizes,
        factorization: (Factorization, f64),
        params: &mut Scope<'_, A>,
    ) -> Result<Self> {
        let Sizes { latent, modes, .. } = sizes;
        let shape = [&[*latent, *latent], &modes[..]].concat();
        let scale = ((latent * latent) as f64).recip();
        let weights = (1..=1 << (modes.len() - 1))
            .map(|n| SpectralWeight::new(&format!("weights{n}"), &shape, scale, factorization, params))
            .collect::<Result<_>>()?;
        Ok(Self { modes: modes.clone(), weights })
    }

    /// For `x` `[extents…, batch, latent]`.
    pub(super) fn forward(&self, x: &A) -> Result<A> {
        in_full_precision(x.device(), || self.convolve(x))
    }

    fn convolve(&self, x: &A) -> Result<A> {
        let count = self.modes.len();
        let shape = x.shape();
        let extents = &shape[..count];
        let dims: Vec<i64> = (0..count as i64).collect();
        let kept: Vec<Vec<Range<i64>>> = self
            .modes
            .iter()
            .zip(extents)
            .enumerate()
            .map(|(dim, (&modes, &extent))| {
                let low = 0..modes;
                if dim + 1 == count { vec![low] } else { vec![low, extent - modes..extent] }
            })
            .collect();

        let kind = x.kind();
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let spectrum = x.to_kind(wide)?.rfftn_modes(&dims, &kept, FftNorm::Backward)?;
        let mixed = self.mixed(&spectrum, 0, 0, wide)?;
        let back = mixed.irfftn_modes_as(x, &dims, &kept, FftNorm::Backward)?;
        Ok(back.to_kind(kind)?)
    }

    /// `modes` `[modes…, batch, in]`, each times its matrix: those of the corners whose dims before `dim` hold the high modes
    /// where `high` has a bit. Corner by corner, since weights are larger than modes: so these are joined, and of a weight
    /// nothing is touched but what meets modes.
    fn mixed(&self, modes: &A, dim: usize, high: usize, kind: Kind) -> Result<A> {
        let count = self.modes.len();
        if dim + 1 == count {
            let order: Vec<i64> = (2..2 + count as i64).chain([0, 1]).collect();
            let weight = self.weights[place(count, high)].complex(kind)?.permute(&order)?;
            return Ok(modes.matmul(&weight)?);
        }
        let half = self.modes[dim];
        let ends = [
            self.mixed(&modes.narrow(dim as i64, 0, half)?, dim + 1, high, kind)?,
            self.mixed(&modes.narrow(dim as i64, half, half)?, dim + 1, high | 1 << dim, kind)?,
        ];
        Ok(A::cat(&[&ends[0], &ends[1]], dim as i64)?)
    }
}

/// The place of a corner among PhysicsNeMo's weights: they are counted with the first dim fastest, but in four dimensions those
/// with one high dim come before those with two.
fn place(dims: usize, high: usize) -> usize {
    match (dims, high) {
        (4, 0b011) => 4,
        (4, 0b100) => 3,
        _ => high,
    }
}
