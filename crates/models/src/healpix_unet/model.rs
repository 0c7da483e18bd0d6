//! The U-Net of DLWP-HEALPix.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::net::Net;
use super::plan::Plan;
use super::{HealpixUNetConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::model::Model;

const FACES: i64 = 12;

/// The U-Net of DLWP-HEALPix: Karlbauer et al., *Advancing Parsimonious Deep Learning Weather Prediction Using the HEALPix Mesh*,
/// arXiv:2311.06253, as PhysicsNeMo builds it from Hydra's dictionaries.
///
/// With B for blocks of convolutions that pad the twelve faces with their neighbours, σ for activations, ↓ for poolings and ↑ for
/// transposed convolutions whose kernels are their strides,
///
/// ```text
/// h₀ = B(x)
/// hᵢ₊₁ = B(↓ hᵢ)
/// u = B(h_last)
/// u ← B([σ(↑ u), hᵢ])              for each finer grid
/// y = B(u)
/// ```
///
/// | block | is |
/// |---|---|
/// | `ConvNeXtBlock` | s(x) + conv₁(σ(conv(σ(conv(x))))), `upscale_factor` times the channels inside |
/// | `DoubleConvNeXtBlock` | x ← s(x) + σ(conv₁(σ(conv₁(σ(conv(x)))))), twice, with the channels of the grid between |
/// | `SymmetricConvNeXtBlock` | s(x) + σ(conv(σ(conv₁(σ(conv₁(σ(conv(x)))))))), `upscale_factor` times the channels in the middle |
/// | `Multi_SymmetricConvNeXtBlock` | `n_layers` symmetric blocks |
/// | `BasicConvBlock` | σ(conv(x)), `n_layers` times |
///
/// s is a convolution with kernels of 1 if the number of channels changes (in a symmetric block, if the inputs are not as many as the
/// channels of the grid), else the identity. With a `recurrent_block`, a convolutional GRU follows the block of each grid on the way up:
/// [r, u] = logistic(conv([x, h])), h ← (1 − u) h + u tanh(conv([x, r h])), and x ← x + h; h is 0 before the first pass. Where three faces meet, at two corners of each face at the equator, the diagonal of the
/// padding is the mean of two faces.
///
/// Inputs are numbered `inputs.0`, `inputs.1`, …: the prognostic fields
/// `[batch, 12, input_time_dim, input_channels, n, n]`; with `decoder_input_channels`, the prescribed fields
/// `[batch, 12, time, decoder_input_channels, n, n]`; with `n_constants`, the constants `[12, n_constants, n, n]`; with `couplings`,
/// the fields of other models for each pass `[pass, batch, channel, 12, n, n]`.
/// The output is `fields` `[batch, 12, output_time_dim, output_channels, n, n]`. One pass of the network computes
/// `input_time_dim` time steps; the next pass takes them as prognostic fields, with the next prescribed time steps.
/// With `output_time_dim` 1, one pass computes that step. A model without prescribed fields and constants also takes
/// `fields` `[batch, time · channel, 12, n, n]`, times slowest; its output then has the same form.
///
/// State dict: `encoder.encoder.{i}.{0 or 1}.…`, `decoder.decoder.{i}.{upsamp, conv}.…` and `decoder.output_layer.…`, with `skip_module`
/// and `convblock.{j}` in blocks; `layers.1` of convolutions with padding, else `layers.0`. The caps of activations are buffers, under
/// the name of each use. Weights start as PyTorch's.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::{HealpixUNet, HealpixUNetConfig, Mode};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config: HealpixUNetConfig = serde_json::from_str(
///     r#"{
///         "encoder": {
///             "conv_block": { "_target_": "ConvNeXtBlock", "activation": { "_target_": "CappedGELU", "cap_value": 10 } },
///             "n_channels": [4, 8], "n_layers": [1, 1], "dilations": [1, 2]
///         },
///         "decoder": {
///             "conv_block": { "_target_": "ConvNeXtBlock", "activation": { "_target_": "CappedGELU", "cap_value": 10 } },
///             "output_layer": { "_target_": "BasicConvBlock", "kernel_size": 1 },
///             "n_channels": [8, 4], "n_layers": [1, 1], "dilations": [2, 1]
///         },
///         "input_channels": 3, "output_channels": 3, "n_constants": 1, "input_time_dim": 2, "output_time_dim": 4
///     }"#,
/// )?;
/// let model = HealpixUNet::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let (prognostic, constants) = ([1, 12, 2, 3, 8, 8], [12, 1, 8, 8]);
/// let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
/// let y = model.forward(&zeros(&prognostic), None, Some(&zeros(&constants)), None, Mode::Eval)?;
/// assert_eq!(y.size(), [1, 12, 4, 3, 8, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HealpixUNet<A = Tensor> {
    plan: Plan,
    net: Net<A>,
}

/// Inputs with the faces first: `[12, batch, time, channel, n, n]`, the constants `[12, 1, n_constants, n, n]`, and the fields of other
/// models `[pass, 12, batch, channel, n, n]`.
struct Inputs<A> {
    prognostic: A,
    prescribed: Option<A>,
    constants: Option<A>,
    coupled: Option<A>,
}

impl<A: Array> HealpixUNet<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// An unknown class, lists of other lengths than `n_channels`, even kernels, channels or times that do not fit each other, a
    /// size of 0; or `params` refuses a parameter.
    pub fn new(config: &HealpixUNetConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let plan = Plan::new(config)?;
        let net = Net::new(&plan, config.gradient_checkpointing, params)?;
        Ok(Self { plan, net })
    }

    /// Computes `[batch, 12, output_time_dim, output_channels, n, n]` from `prognostic` `[batch, 12, input_time_dim, input_channels,
    /// n, n]`, `prescribed` `[batch, 12, time, decoder_input_channels, n, n]`, `constants` `[12, n_constants, n, n]`, and the fields of
    /// other models `coupled` `[pass, batch, channel, 12, n, n]`, where the model has such.
    ///
    /// # Errors
    ///
    /// An input that is missing, superfluous or of another shape; or an operator fails.
    pub fn forward(
        &self,
        prognostic: &A,
        prescribed: Option<&A>,
        constants: Option<&A>,
        coupled: Option<&A>,
        mode: Mode<'_>,
    ) -> Result<A> {
        self.check(prognostic, prescribed, constants)?;
        self.check_coupled(prognostic, coupled)?;
        let faces_first = |x: &A| x.transpose(0, 1);
        let inputs = Inputs {
            prognostic: faces_first(prognostic)?,
            prescribed: prescribed.map(faces_first).transpose()?,
            constants: constants.map(|x| x.unsqueeze(1)).transpose()?,
            coupled: coupled.map(|x| x.permute(&[0, 3, 1, 2, 4, 5])).transpose()?,
        };
        Ok(self.run(&inputs, mode)?.transpose(0, 1)?)
    }

    /// Computes `[batch, output_time_dim · output_channels, 12, n, n]` from `x` `[batch, input_time_dim · input_channels, 12, n, n]`.
    ///
    /// # Errors
    ///
    /// A model with further inputs, `x` of another shape, or an operator fails.
    pub fn forward_fields(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let Plan { times, channels, output_channels, .. } = self.plan;
        let shape = x.shape();
        let fits = matches!(*shape.as_slice(), [_, all, FACES, n, columns]
            if all == times * channels && n == columns && self.plan.fits(n));
        if !fits || self.plan.prescribed + self.plan.constants > 0 {
            let extra = if fits { ", of a model without decoder inputs and constants" } else { "" };
            let want = format!("[batch, {}, 12, n, n] with {}{extra}", times * channels, self.plan.extents());
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let (batch, n) = (shape[0], shape[3]);
        let faces_first = x.permute(&[2, 0, 1, 3, 4])?.reshape(&[FACES, batch, times, channels, n, n])?;
        let y = self.run(
            &Inputs { prognostic: faces_first, prescribed: None, constants: None, coupled: None },
            mode,
        )?;
        let all = y.extent(2)? * output_channels;
        Ok(y.reshape(&[FACES, batch, all, n, n])?.permute(&[1, 2, 0, 3, 4])?)
    }

    /// All steps: `[12, batch, output_time_dim, output_channels, n, n]`.
    fn run(&self, inputs: &Inputs<A>, mode: Mode<'_>) -> Result<A> {
        let Plan { times, steps, output_times, output_channels, .. } = self.plan;
        let shape = inputs.prognostic.shape();
        let (batch, n) = (shape[1], shape[4]);
        let merged = |x: &A| {
            let shape = x.shape();
            x.reshape(&[FACES, batch, shape[2] * shape[3], n, n])
        };
        let constants = match &inputs.constants {
            Some(constants) => Some(constants.expand(&[-1, batch, -1, -1, -1])?),
            None => None,
        };
        let mut state = merged(&inputs.prognostic)?;
        let mut outputs = Vec::with_capacity(steps as usize);
        let mut states = self.net.states();
        for step in 0..steps {
            let prescribed = match &inputs.prescribed {
                Some(prescribed) => Some(merged(&prescribed.narrow(2, step * times, times)?)?),
                None => None,
            };
            let coupled = inputs.coupled.as_ref().map(|coupled| coupled.select(0, step)).transpose()?;
            let parts = [&state].into_iter().chain(&prescribed).chain(&constants).chain(&coupled);
            let parts: Vec<&A> = parts.collect();
            let x = if parts.len() > 1 { A::cat(&parts, 2)? } else { state.shallow_clone() };
            let x = x.reshape(&[FACES * batch, self.plan.inputs(), n, n])?;
            let y = self.net.forward(&x, &mut states, mode)?;
            state = y.reshape(&[FACES, batch, output_times * output_channels, n, n])?;
            outputs.push(state.reshape(&[FACES, batch, output_times, output_channels, n, n])?);
        }
        Ok(A::cat(&outputs.iter().collect::<Vec<_>>(), 2)?)
    }

    fn check(&self, prognostic: &A, prescribed: Option<&A>, constants: Option<&A>) -> Result<()> {
        let Plan { times, channels, steps, .. } = self.plan;
        let shape = prognostic.shape();
        let (batch, n) = match *shape.as_slice() {
            [batch, FACES, given, width, n, columns]
                if given == times && width == channels && n == columns && self.plan.fits(n) =>
            {
                (batch, n)
            }
            _ => {
                let want =
                    format!("inputs.0 [batch, 12, {times}, {channels}, n, n] with {}", self.plan.extents());
                return Err(Error::Input { model: MODEL, got: shape, want });
            }
        };
        let given = prescribed.map(A::shape).unwrap_or_default();
        let fits = match *given.as_slice() {
            [] => self.plan.prescribed == 0,
            [b, FACES, time, width, h, w] => {
                (b, width, h, w) == (batch, self.plan.prescribed, n, n) && time >= steps * times && width > 0
            }
            _ => false,
        };
        if !fits {
            let want = match self.plan.prescribed {
                0 => "no decoder inputs, as decoder_input_channels is 0".to_owned(),
                width => format!(
                    "decoder inputs [{batch}, 12, time, {width}, {n}, {n}] with time at least {}",
                    steps * times
                ),
            };
            return Err(Error::Input { model: MODEL, got: given, want });
        }
        let given = constants.map(A::shape).unwrap_or_default();
        let expected = match self.plan.constants {
            0 => Vec::new(),
            width => vec![FACES, width, n, n],
        };
        if given != expected {
            let want = format!("constants {expected:?}");
            return Err(Error::Input { model: MODEL, got: given, want });
        }
        Ok(())
    }
}

impl<A: Array> HealpixUNet<A> {
    fn check_coupled(&self, prognostic: &A, coupled: Option<&A>) -> Result<()> {
        let shape = prognostic.shape();
        let given = coupled.map(A::shape).unwrap_or_default();
        let expected = match self.plan.coupled {
            0 => Vec::new(),
            width => vec![self.plan.steps, shape[0], width, FACES, shape[4], shape[5]],
        };
        if given != expected {
            let want = format!("fields of other models {expected:?}");
            return Err(Error::Input { model: MODEL, got: given, want });
        }
        Ok(())
    }
}

impl<A: Array> Model<A> for HealpixUNet<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        if let Some(fields) = batch.get(Batch::<A>::FIELDS) {
            return Ok(Batch::of_fields(self.forward_fields(fields, mode)?));
        }
        let has_prescribed = self.plan.prescribed > 0;
        let prognostic = batch.require(MODEL, "inputs.0")?;
        let prescribed = if has_prescribed { Some(batch.require(MODEL, "inputs.1")?) } else { None };
        let constants = match (self.plan.constants > 0, has_prescribed) {
            (false, _) => None,
            (true, true) => Some(batch.require(MODEL, "inputs.2")?),
            (true, false) => Some(batch.require(MODEL, "inputs.1")?),
        };
        let coupled = if self.plan.coupled > 0 { Some(batch.require(MODEL, "inputs.3")?) } else { None };
        Ok(Batch::of_fields(self.forward(prognostic, prescribed, constants, coupled, mode)?))
    }
}
