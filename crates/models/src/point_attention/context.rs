//! A context: slices of other points.

use isobar_array::Array;
use isobar_nn::{ConcreteDropout, Mode};
use isobar_shard::Params;

use super::slices::{Sliced, Slicing};
use super::spec::{AttentionSpec, PointDropout};
use crate::error::Result;
use crate::layers::Recompute;

/// Points of a context as slices `[batch, heads, slices, features]`. State dict: that of the slicing, and `output_dropout` with trained
/// probabilities of dropout.
#[derive(Debug)]
pub(crate) struct Tokenizer<A> {
    slicing: Recompute<Slicing<A>>,
    tiles: usize,
    dropout: Option<ConcreteDropout<A>>,
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
        let dropout = match spec.dropout {
            PointDropout::Fixed(_) => None,
            PointDropout::Trained { start, .. } => {
                Some(ConcreteDropout::new(start, &mut params.scope("output_dropout"))?)
            }
        };
        Ok(Self { slicing: Recompute::new(name, slicing, spec.tiles > 1), tiles: spec.tiles, dropout })
    }

    /// Computes the slices of `x` `[batch, points…, in_features]`.
    pub(crate) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let tokens = Sliced::new(&self.slicing, x, self.tiles, mode)?.tokens(mode)?;
        match &self.dropout {
            Some(dropout) => Ok(dropout.forward(&tokens, mode)?),
            None => Ok(tokens),
        }
    }

    /// Computes what a trained probability of dropout adds to the loss, if there is one.
    pub(crate) fn regularization(&self) -> Result<Option<A>> {
        Ok(self.dropout.as_ref().map(ConcreteDropout::regularization).transpose()?)
    }
}
