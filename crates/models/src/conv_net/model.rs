//! The plain convolutional network.

use isobar_array::{Array, Conv, Padding};
use isobar_nn::{Activation, ActivationLayer, ConvNd, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::{ConvNetConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::layers::Recompute;
use crate::model::Model;

/// A stack of convolutions at the resolution of the fields, the baseline of APEBench: Koehler, Niedermayr, Westermann, Thuerey,
/// *APEBench: A Benchmark for Autoregressive Neural Emulators of PDEs*, arXiv:2411.00180.
///
/// With σ for the activation and convₖ for convolutions of extent k that keep the extents,
///
/// ```text
/// h = σ(convₖ(x))
/// h ← σ(convₖ(h))      depth − 1 times
/// y = convₖ(h)
/// ```
///
/// An output point depends on (depth + 1) (k − 1) / 2 points on each side. Initial weights are PyTorch's. State dict:
/// `layers.{i}.{weight,bias}`, i from 0 to `depth`.
///
/// ```
/// use isobar_models::{ConvNet, ConvNetConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = ConvNetConfig { hidden_channels: 4, depth: 2, ..ConvNetConfig::new(1, 3, 1) };
/// let model = ConvNet::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::zeros([2, 1, 16], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [2, 3, 16]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct ConvNet<A = Tensor> {
    inputs: i64,
    dimension: usize,
    hidden: Vec<Recompute<Hidden<A>>>,
    last: ConvNd<A>,
}

/// A convolution and its activation.
#[derive(Debug)]
struct Hidden<A> {
    conv: ConvNd<A>,
    activation: ActivationLayer<A>,
}

impl<A: Array> ConvNet<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0, `dimension` not 1 to 3, `kernel_size` even, the activation `stan` or one with a parameter; or `params` refuses a
    /// parameter.
    pub fn new(config: &ConvNetConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.out_channels)?;
        let width = check.extent("hidden_channels", config.hidden_channels)?;
        let kernel = check.extent("kernel_size", config.kernel_size)?;
        let (dimension, depth) = (config.dimension, config.depth);
        check.ensure((1..=3).contains(&dimension), || {
            format!("dimension is {dimension}, expected 1, 2 or 3")
        })?;
        check.ensure(depth > 0, || "depth is 0, expected at least 1".into())?;
        check.ensure(kernel % 2 == 1, || {
            format!("kernel_size is {kernel}, expected an odd number, so that the padding is the same on both sides")
        })?;
        check.ensure(config.activation_fn != Activation::Stan, || {
            "activation_fn is stan, which is for single features".into()
        })?;
        let conv = |channels: [i64; 2], params: &mut isobar_shard::Scope<'_, A>| {
            let conv = Conv {
                padding: Padding::Each(vec![kernel / 2]),
                padding_mode: config.padding_mode.into(),
                ..Conv::default()
            };
            ConvNd::new(channels, &vec![kernel; dimension], conv, params)
        };
        let hidden = (0..depth)
            .map(|i| {
                let name = format!("layers.{i}");
                let channels = [if i == 0 { inputs } else { width }, width];
                let conv = conv(channels, &mut params.scope(&name))?;
                let mut params = params.scope(&format!("activations.{i}"));
                let layer =
                    Hidden { conv, activation: ActivationLayer::new(config.activation_fn, &mut params)? };
                Ok(Recompute::new(&name, layer, config.gradient_checkpointing))
            })
            .collect::<Result<_>>()?;
        let last = conv([width, outputs], &mut params.scope(&format!("layers.{depth}")))?;
        Ok(Self { inputs, dimension, hidden, last })
    }

    /// Computes `[batch, out_channels, spatial…]` from `x` `[batch, in_channels, spatial…]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        if shape.len() != self.dimension + 2 || shape[1] != self.inputs || shape[2..].contains(&0) {
            let want = format!("[batch, {}, {} spatial dims]", self.inputs, self.dimension);
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let mut h = x.shallow_clone();
        for layer in &self.hidden {
            h = layer.forward(&[&h], mode, |layer, inputs, _| {
                Ok(layer.activation.forward(&layer.conv.forward(&inputs[0])?)?)
            })?;
        }
        Ok(self.last.forward(&h)?)
    }
}

impl<A: Array> Model<A> for ConvNet<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}
