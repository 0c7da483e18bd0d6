//! Patches of fields as tokens, and back.

use isobar_array::{Array, Conv};
use isobar_nn::{ConvNd, ConvTransposeNd};
use isobar_shard::Params;

use super::{centred, crop, pad};
use crate::error::Result;

/// Number of patches that cover an extent.
pub(crate) fn patches(extent: i64, patch: i64) -> i64 {
    (extent + patch - 1) / patch
}

/// Margins by which an extent becomes a multiple of the patch.
fn margin(extent: i64, patch: i64) -> (i64, i64) {
    centred(patches(extent, patch) * patch - extent)
}

/// Embedding of patches: a convolution whose stride is its kernel, after zeros are added around the fields.
#[derive(Debug)]
pub(crate) struct PatchEmbed<A> {
    proj: ConvNd<A>,
    margins: Vec<(usize, (i64, i64))>,
}

impl<A: Array> PatchEmbed<A> {
    /// Makes the embedding of fields of these extents.
    pub(crate) fn new(
        channels: [i64; 2],
        patch: &[i64],
        extents: &[i64],
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let margins = extents.iter().zip(patch).map(|(&extent, &patch)| margin(extent, patch));
        Self::with_margins(channels, patch, margins.collect(), params)
    }

    /// Makes the embedding of fields with these margins, which may leave points at the end that no patch has.
    pub(crate) fn with_margins(
        channels: [i64; 2],
        patch: &[i64],
        margins: Vec<(i64, i64)>,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let conv = Conv { stride: patch.to_vec(), ..Conv::default() };
        let proj = ConvNd::new(channels, patch, conv, &mut params.scope("proj"))?;
        Ok(Self { proj, margins: margins.into_iter().enumerate().map(|(i, pair)| (i + 2, pair)).collect() })
    }

    /// Computes `[batch, width, patches…]` from fields `[batch, channel, extents…]`.
    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        Ok(self.proj.forward(&pad(x, &self.margins)?)?)
    }
}

/// Fields from tokens: a transposed convolution whose stride is its kernel, and the middle of the result.
#[derive(Debug)]
pub(crate) struct PatchRecovery<A> {
    conv: ConvTransposeNd<A>,
    extents: Vec<(usize, i64)>,
}

impl<A: Array> PatchRecovery<A> {
    /// Makes fields of these extents.
    pub(crate) fn new(
        channels: [i64; 2],
        patch: &[i64],
        extents: &[i64],
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let conv = Conv { stride: patch.to_vec(), ..Conv::default() };
        let conv = ConvTransposeNd::new(channels, patch, conv, &[0], &mut params.scope("conv"))?;
        Ok(Self { conv, extents: extents.iter().enumerate().map(|(i, &extent)| (i + 2, extent)).collect() })
    }

    /// Computes `[batch, channel, extents…]` from `[batch, width, patches…]`.
    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        crop(&self.conv.forward(x)?, &self.extents)
    }
}
