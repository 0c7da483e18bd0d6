//! Blocks of the network.

use isobar_array::Array;
use isobar_nn::{Activation, ConcreteDropout, LayerNorm, Linear, Mode};
use isobar_shard::Params;

use super::flare::FlareAttention;
use super::mlp::PointMlp;
use super::slices::SliceAttention;
use super::spec::{AttentionKind, AttentionSpec, PointDropout};
use crate::error::Result;
use crate::layers::Start;

#[derive(Debug)]
enum Attention<A> {
    Slices(SliceAttention<A>),
    Flare(FlareAttention<A>),
}

/// Dropout of what attention adds to the points.
#[derive(Debug)]
enum OutDropout<A> {
    Fixed(f64),
    Trained(ConcreteDropout<A>),
}

/// Dropout of what attention adds to the points, and of both sums. State dict: `Attn.out_dropout`, `attn_dropout`, `ffn_dropout`.
#[derive(Debug)]
struct Dropouts<A> {
    out: OutDropout<A>,
    sums: Option<[ConcreteDropout<A>; 2]>,
}

impl<A: Array> Dropouts<A> {
    fn new(spec: &AttentionSpec, params: &mut impl Params<Array = A>) -> Result<Self> {
        let (p, given) = match spec.dropout {
            PointDropout::Fixed(p) => return Ok(Self { out: OutDropout::Fixed(p), sums: None }),
            PointDropout::Trained { start, given } => (start, given),
        };
        let mut made = |name: &str| ConcreteDropout::new(p, &mut params.scope(name));
        // PhysicsNeMo has no concrete dropout in slice attention on a grid.
        let out = match spec.kind == AttentionKind::Slices && spec.grid.is_some() {
            true => OutDropout::Fixed(given),
            false => OutDropout::Trained(made("Attn.out_dropout")?),
        };
        Ok(Self { out, sums: Some([made("attn_dropout")?, made("ffn_dropout")?]) })
    }

    fn of_attention(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        Ok(match &self.out {
            OutDropout::Fixed(p) => mode.dropout(x, *p, 0, &[])?,
            OutDropout::Trained(out) => out.forward(x, mode)?,
        })
    }

    /// Drops elements of the first or second sum.
    fn of_sum(&self, sum: usize, x: A, mode: Mode<'_>) -> Result<A> {
        match &self.sums {
            None => Ok(x),
            Some(sums) => Ok(sums[sum].forward(&x, mode)?),
        }
    }

    fn trained(&self) -> impl Iterator<Item = &ConcreteDropout<A>> {
        let out = match &self.out {
            OutDropout::Fixed(_) => None,
            OutDropout::Trained(out) => Some(out),
        };
        out.into_iter().chain(self.sums.iter().flatten())
    }
}

/// x += attention(norm(x)); x += mlp(norm(x)). State dict: `ln_1`, `Attn`, `ln_mlp1.0`, `ln_mlp1.1`, and names of trained
/// probabilities of dropout.
#[derive(Debug)]
pub(crate) struct Block<A> {
    ln_1: LayerNorm<A>,
    attention: Attention<A>,
    dropouts: Dropouts<A>,
    ln_mlp: LayerNorm<A>,
    mlp: PointMlp<A>,
}

impl<A: Array> Block<A> {
    /// Makes the block `name`, whose parameters are under that name. The hidden features of its perceptron are `ratio` times the
    /// width.
    pub(crate) fn new(
        name: &str,
        spec: &AttentionSpec,
        (activation, ratio): (Activation, i64),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let mut params = params.scope(name);
        let width = spec.width;
        let ln_1 = LayerNorm::new(&[width], &mut params.scope("ln_1"))?;
        let attention = {
            let (name, params) = (format!("{name}.Attn"), &mut params.scope("Attn"));
            match spec.kind {
                AttentionKind::Slices => Attention::Slices(SliceAttention::new(&name, spec, params)?),
                AttentionKind::Flare => Attention::Flare(FlareAttention::new(&name, spec, params)?),
            }
        };
        let ln_mlp = LayerNorm::new(&[width], &mut params.scope("ln_mlp1.0"))?;
        let sizes = [width, width.saturating_mul(ratio), width];
        let mlp = PointMlp::new(sizes, activation, spec.start, &mut params.scope("ln_mlp1.1"))?;
        let dropouts = Dropouts::new(spec, &mut params)?;
        Ok(Self { ln_1, attention, dropouts, ln_mlp, mlp })
    }

    /// Computes points `[batch, points…, width]` from such points and the context's slices.
    pub(crate) fn forward(&self, x: &A, context: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let normed = self.ln_1.forward(x)?;
        let mixed = match &self.attention {
            Attention::Slices(attention) => attention.forward(&normed, context, mode)?,
            Attention::Flare(attention) => attention.forward(&normed, context, mode)?,
        };
        let x = self.dropouts.of_attention(&mixed, mode)?.add(x)?;
        let x = self.dropouts.of_sum(0, x, mode)?;
        let y = self.mlp.forward(&self.ln_mlp.forward(&x)?)?.add(&x)?;
        self.dropouts.of_sum(1, y, mode)
    }

    /// Computes what each trained probability of dropout adds to the loss.
    pub(crate) fn regularization(&self) -> Result<Vec<A>> {
        self.dropouts.trained().map(|dropout| Ok(dropout.regularization()?)).collect()
    }
}

/// A norm and a linear layer to the outputs. State dict: `0` and `1`.
#[derive(Debug)]
pub(crate) struct Head<A> {
    norm: LayerNorm<A>,
    linear: Linear<A>,
}

impl<A: Array> Head<A> {
    pub(crate) fn new(channels: [i64; 2], start: Start, params: &mut impl Params<Array = A>) -> Result<Self> {
        let norm = LayerNorm::new(&channels[..1], &mut params.scope("0"))?;
        Ok(Self { norm, linear: start.linear(channels, true, &mut params.scope("1"))? })
    }

    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        Ok(self.linear.forward(&self.norm.forward(x)?)?)
    }
}
