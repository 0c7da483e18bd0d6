//! A gated recurrent unit with convolutions.

use isobar_array::{Array, Unary};
use isobar_shard::Params;

use super::block::FaceConv;
use crate::error::Result;

/// A convolutional GRU with a path around it. With σ the logistic function,
///
/// ```text
/// [r, u] = σ(conv([x, h]))     c = tanh(conv([x, r h]))
/// h ← (1 − u) h + u c          y = x + h
/// ```
#[derive(Debug)]
pub(super) struct Recurrence<A> {
    channels: i64,
    gates: FaceConv<A>,
    candidate: FaceConv<A>,
}

impl<A: Array> Recurrence<A> {
    pub(super) fn new(channels: i64, kernel: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let mut conv =
            |name: &str, outputs: i64| FaceConv::new(name, [2 * channels, outputs], (kernel, 1), params);
        let (gates, candidate) = (conv("conv_gates", 2 * channels)?, conv("conv_can", channels)?);
        Ok(Self { channels, gates, candidate })
    }

    /// Computes y of `x` `[face · batch, channel, n, n]`, and updates the state, which is 0 where there is none yet.
    pub(super) fn forward(&self, x: &A, state: &mut Option<A>) -> Result<A> {
        let h = state.take().map_or_else(|| x.mul_scalar(0.0), Ok)?;
        let gates = self.gates.forward(&A::cat(&[x, &h], 1)?)?.unary(Unary::Sigmoid)?;
        let reset = gates.narrow(1, 0, self.channels)?;
        let update = gates.narrow(1, self.channels, self.channels)?;
        let kept = reset.mul(&h)?;
        let candidate = self.candidate.forward(&A::cat(&[x, &kept], 1)?)?.unary(Unary::Tanh)?;
        let h = h.add(&update.mul(&candidate.sub(&h)?)?)?;
        let y = x.add(&h)?;
        *state = Some(h);
        Ok(y)
    }
}
