//! The two-layer perceptron of transformer blocks.

use isobar_array::Array;
use isobar_shard::{Init, Params, Result};

use crate::activation::{Activation, ActivationLayer};
use crate::dropout::Dropout;
use crate::layer::Layer;
use crate::linear::{Linear, LinearOptions};
use crate::mode::Mode;

/// Options of an [`Mlp`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlpOptions {
    /// Function between the linear layers.
    pub activation: Activation,
    /// Dropout after the activation and after the second layer.
    pub drop: f64,
    /// Standard deviation of weights that start truncated normal, with biases of 0; PyTorch's uniform values where not given.
    pub init_std: Option<f64>,
}

impl Default for MlpOptions {
    fn default() -> Self {
        Self { activation: Activation::Gelu, drop: 0.0, init_std: None }
    }
}

/// fc2(dropout(σ(fc1 x))) and dropout again: the perceptron of transformer blocks (`timm.layers.Mlp`).
///
/// Shapes: input `[…, in_features]`, output `[…, out_features]`. State dict: `fc1.{weight,bias}`, `fc2.{weight,bias}`, and
/// the activation's parameters under `act`.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{Mlp, MlpOptions, Mode};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let mut params = ParamStore::new(Generator::new(1));
/// let mlp = Mlp::new([8, 32, 8], MlpOptions::default(), &mut params)?;
/// let y = mlp.forward(&Tensor::ones([2, 5, 8], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [2, 5, 8]);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Mlp<A> {
    fc1: Linear<A>,
    activation: ActivationLayer<A>,
    fc2: Linear<A>,
    dropout: Dropout,
}

impl<A: Array> Mlp<A> {
    /// Makes the perceptron for `[in_features, hidden_features, out_features]`.
    ///
    /// # Errors
    ///
    /// A size below 1, a dropout outside [0, 1), or a parameter that `params` refuses.
    pub fn new(
        [inputs, hidden, outputs]: [i64; 3],
        options: MlpOptions,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let dropout = Dropout::new(options.drop)?;
        let linear = || LinearOptions {
            weight_init: options.init_std.map(|std| Init::TruncNormal { std }),
            bias_init: options.init_std.map(|_| Init::Constant(0.0)),
            ..LinearOptions::default()
        };
        let fc1 = Linear::with_options(inputs, hidden, linear(), &mut params.scope("fc1"))?;
        let activation = ActivationLayer::new(options.activation, &mut params.scope("act"))?;
        let fc2 = Linear::with_options(hidden, outputs, linear(), &mut params.scope("fc2"))?;
        Ok(Self { fc1, activation, fc2, dropout })
    }

    /// Computes `[…, out_features]` from `x` `[…, in_features]`, whose batch is dim 0.
    ///
    /// # Errors
    ///
    /// Another last extent, or an operator that fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.forward_modulated(x, mode, 0, |hidden| Ok(hidden))
    }

    /// Computes the output with `modulate` applied to the hidden features before the activation; the batch is dim
    /// `batch_dim`.
    ///
    /// # Errors
    ///
    /// Those of `modulate`; another last extent, or an operator that fails.
    pub fn forward_modulated<E: From<isobar_shard::Error>>(
        &self,
        x: &A,
        mode: Mode<'_>,
        batch_dim: usize,
        modulate: impl FnOnce(A) -> Result<A, E>,
    ) -> Result<A, E> {
        let hidden = self.activation.forward(&modulate(self.fc1.forward(x)?)?)?;
        let hidden = self.dropout.forward_parts(&hidden, mode, batch_dim, &[])?;
        Ok(self.dropout.forward_parts(&self.fc2.forward(&hidden)?, mode, batch_dim, &[])?)
    }
}

impl<A: Array> Layer<A> for Mlp<A> {
    fn apply(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.forward(x, mode)
    }
}
