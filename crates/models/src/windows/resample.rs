//! Half the rows and columns with twice the features, and back.

use isobar_array::Array;
use isobar_nn::{LayerNorm, Linear};
use isobar_shard::Params;

use super::{centred, crop, pad};
use crate::error::Result;
use crate::layers::Start;

/// Joins the features of 2 × 2 points, normalises them and maps them to twice the width.
#[derive(Debug)]
pub(crate) struct Downsample<A> {
    norm: LayerNorm<A>,
    linear: Linear<A>,
}

impl<A: Array> Downsample<A> {
    /// Makes the layer for `width` features, whose linear layer has that name.
    pub(crate) fn new(
        width: i64,
        name: &str,
        start: Start,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let linear = start.linear([4 * width, 2 * width], false, &mut params.scope(name))?;
        Ok(Self { linear, norm: LayerNorm::new(&[4 * width], &mut params.scope("norm"))? })
    }

    /// Computes `[batch, levels, ⌈rows / 2⌉, ⌈columns / 2⌉, 2 · width]` from `x` `[batch, levels, rows, columns, width]`.
    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        let odd = |dim: usize| (dim, centred(x.shape()[dim] % 2));
        let x = pad(x, &[odd(2), odd(3)])?;
        let &[batch, levels, rows, columns, width] = &x.shape()[..] else { return Ok(x) };
        let x = x.reshape(&[batch, levels, rows / 2, 2, columns / 2, 2, width])?;
        let x = x.permute(&[0, 1, 2, 4, 3, 5, 6])?;
        let x = x.reshape(&[batch, levels, rows / 2, columns / 2, 4 * width])?;
        Ok(self.linear.forward(&self.norm.forward(&x)?)?)
    }
}

/// Maps each point to 2 × 2 of half the width, cuts the margins off and normalises.
#[derive(Debug)]
pub(crate) struct Upsample<A> {
    extents: [i64; 2],
    linear1: Linear<A>,
    norm: LayerNorm<A>,
    linear2: Linear<A>,
}

impl<A: Array> Upsample<A> {
    /// Makes the layer for a result of `width` features on `extents` rows and columns, whose linear layers have these names.
    pub(crate) fn new(
        width: i64,
        extents: [i64; 2],
        names: [&str; 2],
        start: Start,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let linear1 = start.linear([2 * width, 4 * width], false, &mut params.scope(names[0]))?;
        let linear2 = start.linear([width, width], false, &mut params.scope(names[1]))?;
        Ok(Self { extents, linear1, linear2, norm: LayerNorm::new(&[width], &mut params.scope("norm"))? })
    }

    /// Computes `[batch, levels, extents…, width]` from `x` `[batch, levels, rows, columns, 2 · width]`.
    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        let x = self.linear1.forward(x)?;
        let &[batch, levels, rows, columns, features] = &x.shape()[..] else { return Ok(x) };
        let x = x.reshape(&[batch, levels, rows, columns, 2, 2, features / 4])?;
        let x = x.permute(&[0, 1, 2, 4, 3, 5, 6])?;
        let x = x.reshape(&[batch, levels, 2 * rows, 2 * columns, features / 4])?;
        let x = crop(&x, &[(2, self.extents[0]), (3, self.extents[1])])?;
        Ok(self.linear2.forward(&self.norm.forward(&x)?)?)
    }
}
