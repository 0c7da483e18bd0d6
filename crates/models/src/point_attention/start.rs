//! Initial values.

use isobar_array::Array;
use isobar_nn::{Linear, LinearOptions};
use isobar_shard::{Init, Params};

use crate::error::Result;

/// Initial values of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// PyTorch's.
    Default,
    /// Truncated normal weights with a standard deviation of 0.02, biases of 0.
    TruncNormal,
}

impl Start {
    pub(super) fn weight<A>(self) -> Option<Init<A>> {
        (self == Self::TruncNormal).then_some(Init::TruncNormal { std: 0.02 })
    }

    pub(super) fn bias<A>(self) -> Option<Init<A>> {
        (self == Self::TruncNormal).then_some(Init::Constant(0.0))
    }

    /// Makes a linear layer from `[in_features, out_features]`.
    pub(crate) fn linear<A: Array>(
        self,
        [inputs, outputs]: [i64; 2],
        bias: bool,
        params: &mut impl Params<Array = A>,
    ) -> Result<Linear<A>> {
        let options = LinearOptions {
            bias,
            weight_init: self.weight(),
            bias_init: self.bias(),
            ..LinearOptions::default()
        };
        Ok(Linear::with_options(inputs, outputs, options, params)?)
    }
}
