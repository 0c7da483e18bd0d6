//! Cross attention from a few latent vectors to a context, at each point by itself.

use isobar_array::{Array, Unary};
use isobar_nn::{LayerNorm, Linear};
use isobar_shard::Params;

use crate::error::Result;
use crate::layers::Start;

/// A linear layer as Aurora starts it: truncated normal with standard deviation 0.02, bias 0.
pub(super) fn linear<A: Array>(
    [inputs, outputs]: [i64; 2],
    bias: bool,
    params: &mut impl Params<Array = A>,
) -> Result<Linear<A>> {
    Start::Small.linear([inputs, outputs], bias, params)
}

/// W₂ gelu(W₁ x), named `net.0` and `net.2`.
#[derive(Debug)]
pub(super) struct Net<A>([Linear<A>; 2]);

impl<A: Array> Net<A> {
    pub(super) fn new(width: i64, hidden: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let first = linear([width, hidden], true, &mut params.scope("net.0"))?;
        Ok(Self([first, linear([hidden, width], true, &mut params.scope("net.2"))?]))
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        Ok(self.0[1].forward(&self.0[0].forward(x)?.unary(Unary::Gelu)?)?)
    }
}

/// Sizes of a [`Perceiver`].
#[derive(Debug, Clone, Copy)]
pub(super) struct PerceiverOptions {
    /// Features of latents and context.
    pub(super) width: i64,
    /// Heads of attention, which divide the width.
    pub(super) heads: i64,
    /// Features of the hidden layer.
    pub(super) hidden: i64,
    /// Layers.
    pub(super) depth: usize,
}

/// Layers of cross attention with their norms behind them: l ← l + norm(attention(l, x)), l ← l + norm(W₂ gelu(W₁ l)).
#[derive(Debug)]
pub(super) struct Perceiver<A> {
    heads: i64,
    layers: Vec<Layer<A>>,
}

#[derive(Debug)]
struct Layer<A> {
    to_q: Linear<A>,
    to_kv: Linear<A>,
    to_out: Linear<A>,
    net: Net<A>,
    norms: [LayerNorm<A>; 2],
}

impl<A: Array> Perceiver<A> {
    /// Makes the layers, named `layers.{i}`.
    pub(super) fn new(options: PerceiverOptions, params: &mut impl Params<Array = A>) -> Result<Self> {
        let PerceiverOptions { width, heads, hidden, depth } = options;
        let layer = |i: usize| -> Result<Layer<A>> {
            let params = &mut params.scope(&format!("layers.{i}"));
            let to_q = linear([width; 2], false, &mut params.scope("0.to_q"))?;
            let to_kv = linear([width, 2 * width], false, &mut params.scope("0.to_kv"))?;
            let to_out = linear([width; 2], false, &mut params.scope("0.to_out"))?;
            let net = Net::new(width, hidden, &mut params.scope("1"))?;
            let first = LayerNorm::new(&[width], &mut params.scope("2"))?;
            let norms = [first, LayerNorm::new(&[width], &mut params.scope("3"))?];
            Ok(Layer { to_q, to_kv, to_out, net, norms })
        };
        Ok(Self { heads, layers: (0..depth).map(layer).collect::<Result<_>>()? })
    }

    /// Computes latents `[batch, rows, columns, latents, width]` from `latents`, of the same shape or with leading extents of 1, and
    /// the context `x` `[batch, rows, columns, tokens, width]`.
    pub(super) fn forward(&self, latents: &A, x: &A) -> Result<A> {
        let mut latents = latents.shallow_clone();
        for layer in &self.layers {
            let mixed = layer.norms[0].forward(&layer.attend(self.heads, &latents, x)?)?;
            latents = mixed.add(&latents)?;
            latents = layer.norms[1].forward(&layer.net.forward(&latents)?)?.add(&latents)?;
        }
        Ok(latents)
    }
}

impl<A: Array> Layer<A> {
    fn attend(&self, heads: i64, latents: &A, x: &A) -> Result<A> {
        let width = x.extent(-1)?;
        let features = width / heads;
        let split = |x: &A| -> Result<A> {
            let shape = x.shape();
            Ok(x.reshape(&[&shape[..shape.len() - 1], &[heads, features]].concat())?.transpose(-3, -2)?)
        };
        let q = split(&self.to_q.forward(latents)?.mul_scalar((features as f64).powf(-0.5))?)?;
        let kv = self.to_kv.forward(x)?;
        let k = split(&kv.narrow(-1, 0, width)?)?;
        let v = split(&kv.narrow(-1, width, width)?)?;
        let mixed = q.matmul(&k.transpose(-2, -1)?)?.softmax(-1)?.matmul(&v)?.transpose(-3, -2)?;
        let shape = mixed.shape();
        Ok(self.to_out.forward(&mixed.reshape(&[&shape[..shape.len() - 2], &[width]].concat())?)?)
    }
}
