//! Activation functions.

use isobar_array::{Array, Unary};
use isobar_shard::{Init, Params, Placement, Result};
use schemars::JsonSchema;
use serde::de::value::{SeqAccessDeserializer, StrDeserializer};
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::layer::layers_without_mode;

/// A function between the layers of a network. PhysicsNeMo takes `mish`, `rrelu` and the `hard…` ones but `hardtanh` in the
/// U-Net alone. The short names in capitals, such as `ELU`, are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// max(x, 0)
    #[serde(alias = "RELU")]
    Relu,
    /// x, or 0.1 x below 0 (not PyTorch's default slope of 0.01)
    #[serde(alias = "LEAKY_RELU")]
    LeakyRelu,
    /// x, or a trained weight times x below 0
    Prelu,
    /// x cut to [0, 6]
    Relu6,
    /// x, or eˣ − 1 below 0
    #[serde(alias = "ELU")]
    Elu,
    /// x, or eˣ − 1 below 0
    #[serde(alias = "CELU")]
    Celu,
    /// 1.0507… · (x, or 1.6732… · (eˣ − 1) below 0)
    #[serde(alias = "SELU")]
    Selu,
    /// x · σ(x)
    #[serde(alias = "SILU")]
    Silu,
    /// x · Φ(x), exact
    #[serde(alias = "GELU")]
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
    /// x, or 11/48 x below 0: the mean slope of PyTorch's randomised leaky ReLU, which is its slope outside training
    Rrelu,
    /// x · tanh(ln(1 + eˣ))
    Mish,
    /// x cut to [−3, 3], from there to [0, 1]
    Hardsigmoid,
    /// x · hardsigmoid(x)
    Hardswish,
    /// x, or 0 where it is at most 0.5 from 0
    Hardshrink,
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

impl Activation {
    /// Returns the function of that name in `torch.nn.functional`, with its defaults, or the identity; `None` where there
    /// is none, or none without further arguments.
    pub fn functional(self) -> Option<Functional> {
        match self {
            Self::Prelu
            | Self::Sin
            | Self::Threshold
            | Self::Stan
            | Self::Squareplus
            | Self::CappekLeakyRelu
            | Self::CappedGelu => None,
            other => Some(Functional(other)),
        }
    }

    /// Applies a function without parameters.
    fn of<A: Array>(self, x: &A) -> Result<A> {
        if let Some(function) = self.unary() {
            return Ok(x.unary(function)?);
        }
        let cap = |x: A| x.unary(Unary::Clamp { min: f64::NEG_INFINITY, max: 1.0 });
        Ok(match self {
            Self::Squareplus => {
                let root = x.unary(Unary::Square)?.add_scalar(4.0)?.unary(Unary::Sqrt)?;
                x.add(&root)?.mul_scalar(0.5)?
            }
            Self::CappedGelu => cap(x.gelu()?)?,
            Self::CappekLeakyRelu => cap(x.unary(Unary::LeakyRelu(0.01))?)?,
            Self::Mish => x.mul(&x.unary(Unary::Softplus)?.tanh()?)?,
            Self::Hardsigmoid => {
                let cut = Unary::Clamp { min: 0.0, max: 6.0 };
                x.add_scalar(3.0)?.unary(cut)?.mul_scalar(1.0 / 6.0)?
            }
            Self::Hardswish => x.mul(&Self::Hardsigmoid.of(x)?)?,
            Self::Hardshrink => {
                let above = |x: &A| x.unary(Unary::Threshold { threshold: 0.5, value: 0.0 });
                above(x)?.sub(&above(&x.unary(Unary::Neg)?)?)?
            }
            _ => x.shallow_clone(),
        })
    }

    /// Returns the [`Unary`] that computes it alone.
    fn unary(self) -> Option<Unary> {
        Some(match self {
            Self::Relu => Unary::Relu,
            Self::LeakyRelu => Unary::LeakyRelu(0.1),
            Self::Rrelu => Unary::LeakyRelu(11.0 / 48.0),
            Self::Relu6 => Unary::Clamp { min: 0.0, max: 6.0 },
            Self::Elu => Unary::Elu,
            Self::Celu => Unary::Celu,
            Self::Selu => Unary::Selu,
            Self::Silu => Unary::Silu,
            Self::Gelu => Unary::Gelu,
            Self::Sin => Unary::Sin,
            Self::Sigmoid => Unary::Sigmoid,
            Self::LogSigmoid => Unary::LogSigmoid,
            Self::Softplus => Unary::Softplus,
            Self::Softshrink => Unary::Softshrink(0.5),
            Self::Softsign => Unary::Softsign,
            Self::Tanh => Unary::Tanh,
            Self::Tanhshrink => Unary::Tanhshrink,
            Self::Threshold => Unary::Threshold { threshold: 1.0, value: 1.0 },
            Self::Hardtanh => Unary::Clamp { min: -1.0, max: 1.0 },
            Self::Prelu
            | Self::Mish
            | Self::Hardsigmoid
            | Self::Hardswish
            | Self::Hardshrink
            | Self::Identity
            | Self::Stan
            | Self::Squareplus
            | Self::CappekLeakyRelu
            | Self::CappedGelu => return None,
        })
    }

    /// Returns the name of its entry in the state dict.
    fn state(self) -> Option<&'static str> {
        match self {
            Self::Prelu => Some("weight"),
            Self::Stan => Some("beta"),
            // The cap is in the state dict of the reference, and always 1.
            Self::CappedGelu | Self::CappekLeakyRelu => Some("cap"),
            _ => None,
        }
    }
}

/// A function of `torch.nn.functional` with its defaults, or the identity.
#[derive(Debug, Clone, Copy)]
pub struct Functional(Activation);

impl Functional {
    /// Applies the function to each element.
    ///
    /// # Errors
    ///
    /// A dtype without the function.
    pub fn forward<A: Array>(self, x: &A) -> Result<A> {
        match self.0 {
            Activation::LeakyRelu => Ok(x.unary(Unary::LeakyRelu(0.01))?),
            other => other.of(x),
        }
    }
}

/// An activation with its parameters.
///
/// Shapes: input and output `[…]`. State dict: `weight` `[1]` of `Prelu`, 0.25 at first; `beta` `[1]` of `Stan`, 1 at first; the
/// constant `cap` `[]` of the capped functions. Others have none.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{Activation, ActivationLayer};
/// use isobar_shard::ParamStore;
/// use tch::Tensor;
///
/// let prelu = ActivationLayer::new(Activation::Prelu, &mut ParamStore::new(Generator::new(1)))?;
/// assert_eq!(prelu.forward(&Tensor::from_slice(&[-2f32, 3.0]))?, Tensor::from_slice(&[-0.5f32, 3.0]));
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct ActivationLayer<A> {
    activation: Activation,
    /// The slope of `Prelu`, β of `Stan`.
    trained: Option<A>,
}

impl<A: Array> ActivationLayer<A> {
    /// Makes the activation.
    ///
    /// # Errors
    ///
    /// A parameter that `params` refuses.
    pub fn new(activation: Activation, params: &mut impl Params<Array = A>) -> Result<Self> {
        let whole = Placement::Replicate;
        let trained = match (activation, activation.state()) {
            (_, None) => None,
            (Activation::Prelu, Some(name)) => Some(params.param(name, &[1], Init::Constant(0.25), whole)?),
            (Activation::Stan, Some(name)) => Some(params.param(name, &[1], Init::Constant(1.0), whole)?),
            (_, Some(name)) => {
                params.buffer(name, &[], Init::Constant(1.0), whole)?;
                None
            }
        };
        Ok(Self { activation, trained })
    }

    /// Returns a handle with the same parameters, for another layer.
    pub fn shallow_clone(&self) -> Self {
        Self { activation: self.activation, trained: self.trained.as_ref().map(A::shallow_clone) }
    }

    /// Gives the state of the activation at `scope` the further name `alias`, where one module serves several layers.
    ///
    /// # Errors
    ///
    /// A name that is taken.
    pub fn tie(&self, alias: &str, scope: &str, params: &mut impl Params<Array = A>) -> Result<()> {
        if let Some(name) = self.activation.state() {
            params.tie(&format!("{alias}.{name}"), &format!("{scope}.{name}"))?;
        }
        Ok(())
    }

    /// Applies the function to each element.
    ///
    /// # Errors
    ///
    /// A dtype without the function.
    pub fn forward(&self, x: &A) -> Result<A> {
        match (&self.trained, self.activation) {
            (None, activation) => activation.of(x),
            (Some(beta), Activation::Stan) => Ok(x.tanh()?.mul(&beta.mul(x)?.add_scalar(1.0)?)?),
            (Some(slope), _) => Ok(x.prelu(slope)?),
        }
    }
}

/// Deserializes a name or a list of names.
///
/// # Errors
///
/// Another type, or an unknown name.
pub fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Activation>, D::Error> {
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

layers_without_mode!(ActivationLayer);
