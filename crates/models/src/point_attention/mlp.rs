//! Two linear layers with an activation between, by PhysicsNeMo's names.

use isobar_array::Array;
use isobar_nn::{Activation, ActivationLayer, Linear};
use isobar_shard::Params;

use crate::error::Result;
use crate::layers::Start;

/// W₂ σ(W₁ x). State dict: `layers.0`, `layers.2`, and the activation's parameters under `layers.1`.
#[derive(Debug)]
pub(crate) struct PointMlp<A> {
    first: Linear<A>,
    activation: ActivationLayer<A>,
    second: Linear<A>,
}

impl<A: Array> PointMlp<A> {
    /// Makes the layers for `[in_features, hidden, out_features]`.
    pub(crate) fn new(
        [inputs, hidden, outputs]: [i64; 3],
        activation: Activation,
        start: Start,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let first = start.linear([inputs, hidden], true, &mut params.scope("layers.0"))?;
        let activation = ActivationLayer::new(activation, &mut params.scope("layers.1"))?;
        let second = start.linear([hidden, outputs], true, &mut params.scope("layers.2"))?;
        Ok(Self { first, activation, second })
    }

    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        Ok(self.second.forward(&self.activation.forward(&self.first.forward(x)?)?)?)
    }
}
