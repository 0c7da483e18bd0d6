//! Embedding of the time.

use isobar_array::{Array, Unary};
use isobar_nn::Linear;
use isobar_shard::{Init, Params, Placement};

use crate::error::Result;
use crate::layers::Start;

/// Largest period of the embedding.
const MAX_POSITIONS: f64 = 10_000.0;

/// W₂ silu(W₁ [cos ωₖt, sin ωₖt]) with ωₖ = 10000^(−2k / width), which is added to all points. State dict: the buffer
/// `time_embed.freqs`, and `time_fc.{0,2}`.
#[derive(Debug)]
pub(super) struct TimeEmbedding<A> {
    frequencies: A,
    first: Linear<A>,
    second: Linear<A>,
}

impl<A: Array> TimeEmbedding<A> {
    /// Makes the embedding; `width` is even.
    pub(super) fn new(width: i64, start: Start, params: &mut impl Params<Array = A>) -> Result<Self> {
        let (name, whole) = ("time_embed.freqs", Placement::Replicate);
        let half = width / 2;
        let last = -MAX_POSITIONS.ln() * (half - 1) as f64 / half as f64;
        let logarithms = Init::Linspace { start: 0.0, end: last };
        let values = params.draw(name, &[half], &logarithms, whole)?.unary(Unary::Exp)?;
        let frequencies = params.buffer(name, &[half], Init::Given(values), whole)?;
        let first = start.linear([width; 2], true, &mut params.scope("time_fc.0"))?;
        let second = start.linear([width; 2], true, &mut params.scope("time_fc.2"))?;
        Ok(Self { frequencies, first, second })
    }

    /// Adds the embedding of `time` `[batch]` or `[batch, 1]` to `x` `[batch, points…, width]`.
    pub(super) fn add(&self, x: &A, time: &A) -> Result<A> {
        let shape = x.shape();
        let angles =
            time.reshape(&[shape[0], 1])?.to_kind(self.frequencies.kind())?.mul(&self.frequencies)?;
        let table = A::cat(&[&angles.unary(Unary::Cos)?, &angles.unary(Unary::Sin)?], 1)?;
        // Times and frequencies keep their dtype in mixed precision: 16 bits cannot tell 999 from 1000.
        let hidden = self.first.forward(&table.to_kind(x.kind())?)?.unary(Unary::Silu)?;
        let mut wide = vec![1; shape.len()];
        (wide[0], wide[shape.len() - 1]) = (shape[0], shape[shape.len() - 1]);
        Ok(x.add(&self.second.forward(&hidden)?.reshape(&wide)?)?)
    }
}
