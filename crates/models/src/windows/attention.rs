//! Attention within windows.

use isobar_array::Array;
use isobar_nn::Linear;
use isobar_shard::Params;

use crate::error::Result;
use crate::layers::Start;

/// Multi-head attention of the tokens of a window.
#[derive(Debug)]
pub(crate) struct WindowAttention<A> {
    heads: i64,
    qkv: Linear<A>,
    proj: Linear<A>,
}

impl<A: Array> WindowAttention<A> {
    /// Makes attention of `heads`, which divide `width`.
    pub(crate) fn new(
        width: i64,
        heads: i64,
        start: Start,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let qkv = start.linear([width, 3 * width], true, &mut params.scope("qkv"))?;
        Ok(Self { heads, qkv, proj: start.linear([width, width], true, &mut params.scope("proj"))? })
    }

    /// Computes proj(softmax(q kᵀ / √d + Σ `added`) v) of windows `[batch, windows…, tokens, features]`; what is added broadcasts to
    /// the scores `[batch, windows…, heads, tokens, tokens]`.
    pub(crate) fn forward(&self, x: &A, added: &[A]) -> Result<A> {
        let shape = x.shape();
        let (last, width) = (shape.len() - 1, shape[shape.len() - 1]);
        let features = width / self.heads;
        let qkv = self.qkv.forward(x)?;
        let heads = [&shape[..last], &[self.heads, features]].concat();
        let part = |third: i64| qkv.narrow(-1, third * width, width)?.reshape(&heads)?.transpose(-3, -2);
        let [q, k, v] = [part(0)?, part(1)?, part(2)?];
        let mut scores = q.mul_scalar((features as f64).powf(-0.5))?.matmul(&k.transpose(-2, -1)?)?;
        for added in added {
            scores = scores.add(added)?;
        }
        let mixed = scores.softmax(-1)?.matmul(&v)?;
        Ok(self.proj.forward(&mixed.transpose(-3, -2)?.reshape(&shape)?)?)
    }
}
