//! The fully connected network.

use isobar_array::Array;
use isobar_nn::{Activation, ActivationLayer, Linear, LinearOptions, Mode, WeightForm};
use isobar_shard::{Init, Params, Placement};
use tch::Tensor;

use super::{FullyConnectedConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;

/// A fully connected network: h ← σ(a (W h + b)) for each hidden layer, then W h + b.
///
/// Weights W start Xavier-uniform, biases zero. With `weight_norm` W = g V / ‖V‖, with `weight_fact` W = g v, row by row; a
/// is 1 unless `adaptive_activations`. With `skip_connections`, after the hidden layers 0, 2, 4, … the value that was
/// remembered last is added, and the layer's own output, before that addition, is remembered.
///
/// State dict: `layers.{i}.linear.{weight,bias}`, with `weight_g` or `{g,v}` where factored; `layers.{i}.activation_par`, one
/// tensor for all; `final_layer.linear.{weight,bias}`; what an activation has is under `layers.{i}.activation_fn`.
#[derive(Debug)]
pub struct FullyConnected<A = Tensor> {
    in_features: i64,
    skip: bool,
    hidden: Vec<(Linear<A>, ActivationLayer<A>)>,
    scale: Option<A>,
    last: Linear<A>,
}

impl<A: Array> FullyConnected<A> {
    /// Makes the network, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0, no activation is given, `weight_norm` and `weight_fact` are both set, `stan` is asked for at a width
    /// other than 1, or `params` refuses a parameter.
    pub fn new(config: &FullyConnectedConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let in_features = check.extent("in_features", config.in_features)?;
        let width = check.extent("layer_size", config.layer_size)?;
        let out_features = check.extent("out_features", config.out_features)?;
        let count = check.extent("num_layers", config.num_layers)? as usize;
        check.ensure(!(config.weight_norm && config.weight_fact), || {
            "weight_norm and weight_fact are both set; choose one".into()
        })?;
        let Some(&last_activation) = config.activation_fn.last() else {
            return Err(Error::Config {
                model: MODEL,
                reason: "activation_fn is empty; name one or more".into(),
            });
        };
        let stan = config.activation_fn.iter().take(count).any(|&activation| activation == Activation::Stan);
        check.ensure(!stan || width == 1, || format!("stan needs layer_size 1, not {width}"))?;

        let form = match (config.weight_norm, config.weight_fact) {
            (true, _) => WeightForm::Normalized,
            (_, true) => WeightForm::Factorized,
            _ => WeightForm::Plain,
        };
        let mut hidden = Vec::with_capacity(count);
        let mut scale = None;
        for i in 0..count {
            let mut layer = params.scope(&format!("layers.{i}"));
            if config.adaptive_activations && i == 0 {
                scale =
                    Some(layer.param("activation_par", &[1], Init::Constant(1.0), Placement::Replicate)?);
            }
            let activation = config.activation_fn.get(i).copied().unwrap_or(last_activation);
            let activation = ActivationLayer::new(activation, &mut layer.scope("activation_fn"))?;
            let inputs = if i == 0 { in_features } else { width };
            let linear = Linear::with_options(inputs, width, options(form), &mut layer.scope("linear"))?;
            hidden.push((linear, activation));
            if config.adaptive_activations && i > 0 {
                params.tie(&format!("layers.{i}.activation_par"), "layers.0.activation_par")?;
            }
        }
        let plain = options(WeightForm::Plain);
        let last = Linear::with_options(width, out_features, plain, &mut params.scope("final_layer.linear"))?;
        Ok(Self { in_features, skip: config.skip_connections, hidden, scale, last })
    }

    /// The network's output `[…, out_features]` for `x` `[…, in_features]`, any number of leading dims.
    ///
    /// # Errors
    ///
    /// `x` has another last extent, or an operator fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        let shape = x.shape();
        if shape.last() != Some(&self.in_features) {
            return Err(Error::Input {
                model: MODEL,
                got: shape,
                want: format!("[…, {}]", self.in_features),
            });
        }
        let mut x = x.shallow_clone();
        let mut remembered: Option<A> = None;
        for (i, (layer, activation)) in self.hidden.iter().enumerate() {
            let sum = layer.forward(&x)?;
            let scaled = match &self.scale {
                Some(scale) => sum.mul(scale)?,
                None => sum,
            };
            x = activation.forward(&scaled)?;
            if self.skip && i % 2 == 0 {
                let own = x.shallow_clone();
                if let Some(before) = remembered.replace(own) {
                    x = x.add(&before)?;
                }
            }
        }
        Ok(self.last.forward(&x)?)
    }
}

impl<A: Array> Model<A> for FullyConnected<A> {
    fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
        // The channels of fields are the features.
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let last = x.shape().len() as i64 - 1;
        let channels_last: Vec<i64> = [0].into_iter().chain(2..=last).chain([1]).collect();
        let channels_first: Vec<i64> = [0, last].into_iter().chain(1..last).collect();
        let y = self.forward(&x.permute(&channels_last)?)?;
        Ok(Batch::of_fields(y.permute(&channels_first)?))
    }
}

/// Weights start Xavier-uniform, biases zero.
fn options<A>(form: WeightForm) -> LinearOptions<A> {
    LinearOptions {
        form,
        weight_init: Some(Init::XavierUniform),
        bias_init: Some(Init::Constant(0.0)),
        ..LinearOptions::default()
    }
}
