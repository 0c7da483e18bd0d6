//! Activation functions by the names of PhysicsNeMo's table.

use isobar_shard::{Array, Init, Params, Placement, Unary};
use schemars::JsonSchema;
use serde::de::value::{SeqAccessDeserializer, StrDeserializer};
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// A function between the layers of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// x, or 0.1 x below 0 (not PyTorch's default slope of 0.01)
    LeakyRelu,
    /// x, or a trained weight times x below 0
    Prelu,
    /// x cut to [0, 6]
    Relu6,
    /// x, or eˣ − 1 below 0
    Elu,
    /// x, or eˣ − 1 below 0
    Celu,
    /// 1.0507… · (x, or 1.6732… · (eˣ − 1) below 0)
    Selu,
    /// x · σ(x)
    Silu,
    /// x · Φ(x), exact
    Gelu,
    /// sin x
    Sin,
    /// σ(x) = 1 / (1 + e⁻ˣ)
    Sigmoid,
    /// ln σ(x)
    #[serde(rename = "logsigmoid")]
    LogSigmoid,
    /// ln(1 + eˣ)
    Softplus,
    /// x moved towards 0 by 0.5, and 0 where it was nearer
    Softshrink,
    /// x / (1 + |x|)
    Softsign,
    /// tanh x
    Tanh,
    /// x − tanh x
    Tanhshrink,
    /// max(x, 1)
    Threshold,
    /// x cut to [−1, 1]
    Hardtanh,
    /// x
    Identity,
    /// tanh(x) (1 + β x) with a trained β, for layers of width 1 (Gnanasambandam et al., arXiv:2204.12589)
    Stan,
    /// (x + √(x² + 4)) / 2 (Barron, arXiv:2112.11687)
    Squareplus,
    /// min(leaky ReLU of slope 0.01, 1), under the name that PhysicsNeMo gives it
    CappekLeakyRelu,
    /// min(x · Φ(x), 1)
    CappedGelu,
}

/// An activation with the parameters that it may have.
#[derive(Debug)]
pub(crate) struct ActivationLayer<A> {
    activation: Activation,
    /// The slope of `Prelu`, β of `Stan`.
    trained: Option<A>,
}

impl<A: Array> ActivationLayer<A> {
    pub(crate) fn new(activation: Activation, params: &mut impl Params<Array = A>) -> Result<Self> {
        let mut trained =
            |name, value| params.param(name, &[1], Init::Constant(value), Placement::Replicate).map(Some);
        let trained = match activation {
            Activation::Prelu => trained("weight", 0.25)?,
            Activation::Stan => trained("beta", 1.0)?,
            // The cap is in the state dict of the reference, and always 1.
            Activation::CappedGelu | Activation::CappekLeakyRelu => {
                params.buffer("cap", &[], Init::Constant(1.0), Placement::Replicate)?;
                None
            }
            _ => None,
        };
        Ok(Self { activation, trained })
    }

    /// The name of what it has in the state dict.
    pub(crate) fn state_name(&self) -> Option<&'static str> {
        match self.activation {
            Activation::Prelu => Some("weight"),
            Activation::Stan => Some("beta"),
            Activation::CappedGelu | Activation::CappekLeakyRelu => Some("cap"),
            _ => None,
        }
    }

    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        if let Some(trained) = &self.trained {
            return Ok(match self.activation {
                Activation::Stan => x.tanh()?.mul(&trained.mul(x)?.add_scalar(1.0)?)?,
                _ => x.prelu(trained)?,
            });
        }
        let cap = |x: A| x.unary(Unary::Clamp { min: f64::NEG_INFINITY, max: 1.0 });
        let function = match self.activation {
            Activation::Identity | Activation::Prelu | Activation::Stan => return Ok(x.shallow_clone()),
            Activation::Squareplus => {
                let root = x.unary(Unary::Square)?.add_scalar(4.0)?.unary(Unary::Sqrt)?;
                return Ok(x.add(&root)?.mul_scalar(0.5)?);
            }
            Activation::CappedGelu => return Ok(cap(x.gelu()?)?),
            Activation::CappekLeakyRelu => return Ok(cap(x.unary(Unary::LeakyRelu(0.01))?)?),
            Activation::Relu => Unary::Relu,
            Activation::LeakyRelu => Unary::LeakyRelu(0.1),
            Activation::Relu6 => Unary::Clamp { min: 0.0, max: 6.0 },
            Activation::Elu => Unary::Elu,
            Activation::Celu => Unary::Celu,
            Activation::Selu => Unary::Selu,
            Activation::Silu => Unary::Silu,
            Activation::Gelu => Unary::Gelu,
            Activation::Sin => Unary::Sin,
            Activation::Sigmoid => Unary::Sigmoid,
            Activation::LogSigmoid => Unary::LogSigmoid,
            Activation::Softplus => Unary::Softplus,
            Activation::Softshrink => Unary::Softshrink(0.5),
            Activation::Softsign => Unary::Softsign,
            Activation::Tanh => Unary::Tanh,
            Activation::Tanhshrink => Unary::Tanhshrink,
            Activation::Threshold => Unary::Threshold { threshold: 1.0, value: 1.0 },
            Activation::Hardtanh => Unary::Clamp { min: -1.0, max: 1.0 },
        };
        Ok(x.unary(function)?)
    }
}

/// A name or a list of names.
pub(crate) fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Activation>, D::Error> {
    struct OneOrMany;

    impl<'de> Visitor<'de> for OneOrMany {
        type Value = Vec<Activation>;

        fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str("the name of an activation, or a list of names")
        }

        fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Self::Value, E> {
            Activation::deserialize(StrDeserializer::new(name)).map(|activation| vec![activation])
        }

        fn visit_seq<S: SeqAccess<'de>>(self, names: S) -> Result<Self::Value, S::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(names))
        }
    }

    deserializer.deserialize_any(OneOrMany)
}
