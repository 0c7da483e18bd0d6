//! The Fourier Neural Operator.

use isobar_array::{Array, PadMode};
use isobar_nn::{ActivationLayer, Linear, LinearOptions, Mode, SpectralConv, SpectralOptions};
use isobar_shard::{Init, Params, Scope};
use tch::Tensor;

use super::config::{Misfit, Sizes};
use super::{FnoConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::fully_connected::{FullyConnected, FullyConnectedConfig};
use crate::layers::Recompute;
use crate::model::Model;

/// The Fourier Neural Operator in one to four dimensions: Li et al., *Fourier Neural Operator for Parametric Partial
/// Differential Equations*, arXiv:2010.08895, as PhysicsNeMo builds it.
///
/// Coordinates of the points, from 0 to 1 along each dim, both ends included, are appended to the input's channels. Then, for
/// each point v and layer k,
///
/// ```text
/// v₀ = P₂ σ(P₁ v + b₁) + b₂                          lift
/// vₖ₊₁ = σ( Wₖ vₖ + bₖ + F⁻¹( Rₖ · F vₖ ) )            Fourier layers; no σ after the last
/// ```
///
/// and a [`FullyConnected`] decodes each point. Between, the field is padded behind the end of each dim. F is the real Fourier
/// transform over all dims and R a complex matrix of its own for each mode of the corners of lowest frequencies; the last dim
/// has one such end, the others two. All other modes are 0. Where the two ends overlap their results are *added*, and in two
/// dimensions b₁ and b₂ are not trained; both are PhysicsNeMo's. The transform computes in single precision for half dtypes.
///
/// With a [`Factorization`](isobar_nn::Factorization) the weights R are made of smaller ones before use: R = core ×₁ U₁ ×₂ U₂ … (Tucker), or
/// R = Σᵣ coreᵣ u₁ᵣ ⊗ u₂ᵣ ⊗ … (CP): Kossaifi et al., *Multi-Grid Tensorized Fourier Neural Operator*, arXiv:2310.00120.
///
/// State dict: `decoder_net.*` as [`FullyConnected`]; under `spec_encoder`, `lift_network.{0,2}.conv.{weight,bias}`,
/// `spconv_layers.{k}.weights{n}` with (re, im) as the last dim, `conv_layers.{k}.{weight,bias}`; in four dimensions
/// `lift_network.{0,2}.conv.conv.{weight,bias}` and `conv_layers.{k}.conv.{weight,bias}`. Factored weights are
/// `weights{n}.core` and `weights{n}.factors.{i}`, for the dims in, out, modes. What the activation has is under
/// `activation_fn`, tied to `spec_encoder.activation_fn` and `spec_encoder.lift_network.1`.
#[derive(Debug)]
pub struct Fno<A = Tensor> {
    sizes: Sizes,
    pad_mode: PadMode,
    coordinates: bool,
    lift: [Linear<A>; 2],
    activation: ActivationLayer<A>,
    layers: Vec<Recompute<Layer<A>>>,
    decoder: FullyConnected<A>,
}

/// A Fourier layer; no activation after the last.
#[derive(Debug)]
struct Layer<A> {
    spectral: SpectralConv<A>,
    pointwise: Linear<A>,
    activation: Option<ActivationLayer<A>>,
}

impl<A: Array> Layer<A> {
    /// For `x` `[extents…, batch, latent]`.
    fn forward(&self, x: &A) -> Result<A> {
        let y = self.pointwise.forward(x)?.add(&self.spectral.forward_channels_last(x)?)?;
        Ok(self
            .activation
            .as_ref()
            .map_or_else(|| Ok(y.shallow_clone()), |activation| activation.forward(&y))?)
    }
}

impl<A: Array> Fno<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0, or `latent_channels` 1; `dimension` is not 1 to 4; `num_fno_modes` is a list of fewer; `activation_fn`
    /// is `stan`; `rank` is outside (0, 1]; the decoder's arguments are not those of a [`FullyConnected`]; or `params` refuses
    /// a parameter.
    pub fn new(config: &FnoConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        const ACTIVATION: &str = "activation_fn";
        let sizes = Sizes::new(config)?;
        let (dims, latent) = (config.dimension, sizes.latent);
        let activation = ActivationLayer::new(config.activation_fn, &mut params.scope(ACTIVATION))?;
        for alias in ["spec_encoder.activation_fn", "spec_encoder.lift_network.1"] {
            activation.tie(alias, ACTIVATION, params)?;
        }
        let decoder = FullyConnectedConfig {
            in_features: config.latent_channels,
            layer_size: config.decoder_layer_size,
            out_features: config.out_channels,
            num_layers: config.decoder_layers,
            activation_fn: vec![config.decoder_activation_fn],
            ..Default::default()
        };
        let decoder = FullyConnected::new(&decoder, &mut params.scope("decoder_net"))?;

        let params = &mut params.scope("spec_encoder");
        let inputs = sizes.inputs + if config.coord_features { dims as i64 } else { 0 };
        let lift = |index: usize, inputs, outputs, params: &mut Scope<'_, A>| {
            let scope = &mut params.scope(&format!("lift_network.{index}.conv"));
            pointwise(dims, [inputs, outputs], lifting(dims), scope)
        };
        let lift = [lift(0, inputs, latent / 2, params)?, lift(2, latent / 2, latent, params)?];
        let spectral = SpectralOptions { factorization: config.factorization, rank: config.rank };
        let spectral = (0..config.num_fno_layers)
            .map(|k| {
                let scope = &mut params.scope(&format!("spconv_layers.{k}"));
                Ok(SpectralConv::new(latent, latent, &sizes.modes, spectral, scope)?)
            })
            .collect::<Result<Vec<_>>>()?;
        let linear = (0..config.num_fno_layers)
            .map(|k| {
                let scope = &mut params.scope(&format!("conv_layers.{k}"));
                pointwise(dims, [latent, latent], LinearOptions::default(), scope)
            })
            .collect::<Result<Vec<_>>>()?;
        let count = spectral.len();
        let layers = spectral.into_iter().zip(linear).enumerate().map(|(k, (spectral, pointwise))| {
            let activation = (k + 1 < count).then(|| activation.shallow_clone());
            let layer = Layer { spectral, pointwise, activation };
            Recompute::new(&format!("spec_encoder.layers.{k}"), layer, config.gradient_checkpointing)
        });
        let layers = layers.collect();
        Ok(Self {
            sizes,
            pad_mode: config.padding_type.mode(),
            coordinates: config.coord_features,
            lift,
            activation,
            layers,
            decoder,
        })
    }

    /// The fields `[batch, out_channels, extents…]` for `x` `[batch, in_channels, extents…]`.
    ///
    /// # Errors
    ///
    /// `x` has another number of dims or channels, or a padded extent n that has not the modes m of the configuration: m ≤ n,
    /// and m ≤ n / 2 + 1 for the last; a padding is wider than its type can be; or an operator fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        let count = self.sizes.modes.len();
        let extents = self.check(&x.shape())?;

        // Fields stand as [extents…, batch, channels]: so the transforms and the products over channels are plain matrix
        // products on the memory as it lies, and so are the products mode by mode.
        let order: Vec<i64> = (2..2 + count as i64).chain([0, 1]).collect();
        let mut y = self.with_coordinates(&x.permute(&order)?)?;
        y = self.activation.forward(&self.lift[0].forward(&y)?)?;
        y = self.lift[1].forward(&y)?;
        let padding = &self.sizes.padding;
        if padding.iter().any(|&points| points > 0) {
            let behind = padding.iter().rev().flat_map(|&points| [0, points]);
            let pairs: Vec<i64> = [0; 4].into_iter().chain(behind).collect();
            y = y.pad_mode(&pairs, self.pad_mode, 0.0)?;
        }
        for layer in &self.layers {
            y = layer.forward(&[&y], Mode::Eval, |layer, inputs, _| layer.forward(&inputs[0]))?;
        }
        for (dim, (&extent, &points)) in extents.iter().zip(padding).enumerate() {
            if points > 0 {
                y = y.narrow(dim as i64, 0, extent)?;
            }
        }
        let channels = count as i64 + 1;
        let order: Vec<i64> = [channels - 1, channels].into_iter().chain(0..count as i64).collect();
        Ok(self.decoder.forward(&y)?.permute(&order)?.contiguous()?)
    }

    /// The spatial extents of an input that the model takes.
    fn check(&self, shape: &[i64]) -> Result<Vec<i64>> {
        let Sizes { inputs, modes, padding, .. } = &self.sizes;
        let refuse = |want: String| Error::Input { model: MODEL, got: shape.to_vec(), want };
        let count = modes.len();
        if shape.len() != count + 2 || shape[1] != *inputs {
            return Err(refuse(format!("[batch, {inputs}, and {count} extents]")));
        }
        let extents = &shape[2..];
        match self.sizes.misfit(self.pad_mode, extents) {
            None => Ok(extents.to_vec()),
            Some((dim, Misfit::Modes(least))) => {
                Err(refuse(format!("spatial extent {dim} to be {least} or more, for {} modes", modes[dim])))
            }
            Some((dim, Misfit::Padding(_))) => Err(refuse(format!(
                "spatial extent {dim} to be wide enough for a padding of {}",
                padding[dim]
            ))),
        }
    }

    /// `x` `[extents…, batch, channels]` with a channel for each dim behind its own.
    fn with_coordinates(&self, x: &A) -> Result<A> {
        if !self.coordinates {
            return Ok(x.shallow_clone());
        }
        let mut shape = x.shape();
        let count = shape.len() - 2;
        shape[count + 1] = 1;
        let mut channels = vec![x.shallow_clone()];
        for dim in 0..count {
            let mut line = vec![1; shape.len()];
            line[dim] = shape[dim];
            let coordinate = x.linspace_along(dim as i64, 0.0, 1.0)?.reshape(&line)?;
            channels.push(coordinate.expand(&shape)?);
        }
        Ok(A::cat(&channels.iter().collect::<Vec<_>>(), -1)?)
    }
}

impl<A: Array> Model<A> for Fno<A> {
    fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x)?))
    }
}

/// Makes a convolution whose kernel is one point, as a linear layer on channels-last fields.
fn pointwise<A: Array>(
    dims: usize,
    [inputs, outputs]: [i64; 2],
    options: LinearOptions<A>,
    params: &mut Scope<'_, A>,
) -> Result<Linear<A>> {
    // libtorch has no convolution in four dimensions: PhysicsNeMo flattens the dims, in a module of its own.
    let (kernel_dims, prefix) = if dims == 4 { (1, "conv") } else { (dims, "") };
    let options = LinearOptions { kernel_dims, ..options };
    Ok(Linear::with_options(inputs, outputs, options, &mut params.scope(prefix))?)
}

/// Lifting layers start Xavier-uniform and zero; the bias is frozen in two dimensions.
fn lifting<A>(dims: usize) -> LinearOptions<A> {
    LinearOptions {
        weight_init: Some(Init::XavierUniform),
        bias_init: Some(Init::Constant(0.0)),
        train_bias: dims != 2,
        ..LinearOptions::default()
    }
}
