//! Layer norm whose scale and shift are made from the sample's vector.

use isobar_array::{Array, Unary};
use isobar_nn::{LayerNorm, Linear};
use isobar_shard::{Init, Params, Placement};

use super::MODEL;
use crate::error::{Error, Result};
use crate::layers::Start;

/// Vectors of a token's width, made from the sample's vector: `adaptive_modulation.1`(silu(c)), or trained constants where there is
/// no c. They are all 0 at first.
#[derive(Debug)]
pub(super) struct Modulation<A> {
    width: i64,
    count: i64,
    net: Net<A>,
}

#[derive(Debug)]
enum Net<A> {
    Linear(Linear<A>),
    Constants(A),
}

impl<A: Array> Modulation<A> {
    /// Makes `count` vectors; `start` is for a network other than DiT's.
    pub(super) fn new(
        (width, count): (i64, i64),
        conditioned: bool,
        start: Start,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let params = &mut params.scope("adaptive_modulation.1");
        let net = if conditioned {
            Net::Linear(Linear::with_options(width, count * width, start.options(), params)?)
        } else {
            Net::Constants(params.param(
                "bias",
                &[count * width],
                Init::Constant(0.0),
                Placement::Replicate,
            )?)
        };
        Ok(Self { width, count, net })
    }

    /// The vectors, `[batch, width]` or `[width]`.
    pub(super) fn vectors(&self, c: Option<&A>) -> Result<Vec<A>> {
        let all = match (&self.net, c) {
            (Net::Linear(linear), Some(c)) => linear.forward(&c.unary(Unary::Silu)?)?,
            (Net::Constants(all), _) => all.shallow_clone(),
            (Net::Linear(_), None) => {
                let reason = "modulations need the vector of an embedder".to_owned();
                return Err(Error::Config { model: MODEL, reason });
            }
        };
        Ok(all.split(&vec![self.width; self.count as usize], -1)?)
    }
}

/// LN(x) (1 + scale) + shift.
pub(super) fn modulated<A: Array>(norm: &LayerNorm<A>, x: &A, [shift, scale]: [&A; 2]) -> Result<A> {
    Ok(norm.forward(x)?.mul(&scale.add_scalar(1.0)?)?.add(shift)?)
}
