//! A context: slices of other points.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;

use super::slices::{Sliced, Slicing};
use super::spec::AttentionSpec;
use crate::error::Result;
use crate::layers::Recompute;

/// Points of a context as slices `[batch, heads, slices, features]`.
#[derive(Debug)]
pub(crate) struct Tokenizer<A> {
    slicing: Recompute<Slicing<A>>,
    tiles: usize,
}

impl<A: Array> Tokenizer<A> {
    /// Makes the tokenizer of points with `inputs` features.
    pub(crate) fn new(
        name: &str,
        inputs: i64,
        spec: &AttentionSpec,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let slicing = Slicing::new(inputs, spec, params)?;
        Ok(Self { slicing: Recompute::new(name, slicing, spec.tiles > 1), tiles: spec.tiles })
    }

    /// Computes the slices of `x` `[batch, points…, in_features]`.
    pub(crate) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        Sliced::new(&self.slicing, x, self.tiles, mode)?.tokens(mode)
    }
}
