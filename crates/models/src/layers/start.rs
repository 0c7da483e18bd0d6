//! Initial values.

use isobar_array::Array;
use isobar_nn::{Linear, LinearOptions};
use isobar_shard::{Init, Params};

use crate::error::Result;

/// Initial values of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// PyTorch's.
    Torch,
    /// Xavier-uniform weights, biases of 0.
    Xavier,
    /// Truncated normal weights of standard deviation 0.02, biases of 0.
    Small,
    /// Zeros.
    Zero,
}

impl Start {
    pub(crate) fn options<A>(self) -> LinearOptions<A> {
        LinearOptions { weight_init: self.weight(), bias_init: self.bias(), ..LinearOptions::default() }
    }

    /// Initial weight; `None` for PyTorch's.
    pub(crate) fn weight<A>(self) -> Option<Init<A>> {
        match self {
            Self::Torch => None,
            Self::Xavier => Some(Init::XavierUniform),
            Self::Small => Some(Init::TruncNormal { std: 0.02 }),
            Self::Zero => Some(Init::Constant(0.0)),
        }
    }

    /// Initial bias; `None` for PyTorch's.
    pub(crate) fn bias<A>(self) -> Option<Init<A>> {
        (self != Self::Torch).then_some(Init::Constant(0.0))
    }

    /// Makes a linear layer from `[in_features, out_features]`.
    pub(crate) fn linear<A: Array>(
        self,
        [inputs, outputs]: [i64; 2],
        bias: bool,
        params: &mut impl Params<Array = A>,
    ) -> Result<Linear<A>> {
        let options = LinearOptions { bias, ..self.options() };
        Ok(Linear::with_options(inputs, outputs, options, params)?)
    }
}
