//! Pix2Pix.

use isobar_array::{Array, Conv, PadMode, Padding};
use isobar_nn::{Activation, ConvNd, ConvTransposeNd, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::layers::{Convolution, Modules, Residual, Stage, Stages};
use super::{MODEL, Pix2PixConfig};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::layers::Recompute;
use crate::model::Model;

/// The generator of Pix2Pix: Isola et al., *Image-to-Image Translation with Conditional Adversarial Networks*, arXiv:1611.07004, with
/// the residual blocks of pix2pixHD (Wang et al., arXiv:1711.11585), as PhysicsNeMo builds it.
///
/// With N for a batch norm if there are any, σ for the activation, conv_k for convolutions with kernels of k,
///
/// ```text
/// h = σ(N(conv₇(x)))
/// h ← σ(N(conv₃(h)))                    n_downsampling times: half the extents, twice the channels
/// h ← h + N(conv₃(σ(N(conv₃(h)))))      n_blocks times
/// h ← σ(N(convᵀ₃(h)))                   n_downsampling times: twice the extents, half the channels
/// h ← σ(N(convᵀ₃(h)))                   n_upsampling − n_downsampling times: twice the extents
/// y = conv₇(h)
/// ```
///
/// conv₇ pads by reflection, the residual blocks as `padding_type` says. Odd extents are rounded up on the way down, so that the output
/// then is larger than the input. Weights start as PyTorch's.
///
/// State dict: `model.{j}` in the order of a sequence in which paddings, norms and activations take a number each;
/// `model.{j}.conv_block.{i}` in residual blocks. PhysicsNeMo's `num_batches_tracked` is not there.
///
/// ```
/// use isobar_models::{Mode, Pix2Pix, Pix2PixConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = Pix2PixConfig { conv_layer_size: 4, n_downsampling: 1, n_upsampling: 2, ..Pix2PixConfig::new(1, 2, 2) };
/// let model = Pix2Pix::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::zeros([1, 1, 8, 6], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 2, 16, 12]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Pix2Pix<A = Tensor> {
    inputs: i64,
    dimension: usize,
    down: Vec<Stage<A>>,
    blocks: Vec<Recompute<Residual<A>>>,
    up: Vec<Stage<A>>,
    last: ConvNd<A>,
}

impl<A: Array> Pix2Pix<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0, `dimension` not 1 to 3, a number of samplings above 16, the activation `stan`; or `params` refuses a parameter.
    pub fn new<P: Params<Array = A>>(config: &Pix2PixConfig, params: &mut P) -> Result<Self> {
        let check = Checker(MODEL);
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.out_channels)?;
        let width = check.extent("conv_layer_size", config.conv_layer_size)?;
        let dimension = config.dimension;
        check
            .ensure((1..=3).contains(&dimension), || format!("dimension is {dimension}, expected 1 to 3"))?;
        config.check_samplings()?;
        let widest = width << config.n_downsampling;
        check.ensure(config.activation_fn != Activation::Stan, || {
            "activation_fn is stan, which is for single features".into()
        })?;

        let wide =
            Conv { padding: Padding::Each(vec![3]), padding_mode: PadMode::Reflect, ..Conv::default() };
        let halving = Conv { stride: vec![2], padding: Padding::Each(vec![1]), ..Conv::default() };
        let plain = |channels: [i64; 2], kernel: i64, conv: &Conv| {
            let conv = conv.clone();
            move |name: &str, params: &mut P| -> Result<Convolution<A>> {
                let kernel = vec![kernel; dimension];
                Ok(Convolution::Plain(ConvNd::new(channels, &kernel, conv, &mut params.scope(name))?))
            }
        };
        let doubling = |channels: [i64; 2]| {
            let conv = halving.clone();
            move |name: &str, params: &mut P| -> Result<Convolution<A>> {
                let (kernel, params) = (vec![3; dimension], &mut params.scope(name));
                Ok(Convolution::Transposed(ConvTransposeNd::new(channels, &kernel, conv, &[1], params)?))
            }
        };

        let mut stages = Stages { config, activation: None };
        // The padding of the first convolution is a module.
        let mut at = Modules("model".to_owned(), 1);
        let mut down =
            vec![stages.stage(&mut at, (width, true), params, plain([inputs, width], 7, &wide))?];
        for i in 0..config.n_downsampling {
            let channels = [width << i, width << (i + 1)];
            down.push(stages.stage(&mut at, (channels[1], true), params, plain(channels, 3, &halving))?);
        }
        let mut blocks = Vec::new();
        for _ in 0..config.n_blocks {
            let name = at.next();
            let mut inside = Modules(format!("{name}.conv_block"), 0);
            let mut stage = |activates: bool| {
                inside.1 += config.padding_type.modules();
                let conv = plain([widest; 2], 3, &config.padding_type.conv());
                stages.stage(&mut inside, (widest, activates), params, conv)
            };
            let block = Residual([stage(true)?, stage(false)?]);
            blocks.push(Recompute::new(&name, block, config.gradient_checkpointing));
        }
        let mut up = Vec::new();
        for i in (0..config.n_downsampling).rev() {
            let channels = [width << (i + 1), width << i];
            up.push(stages.stage(&mut at, (channels[1], true), params, doubling(channels))?);
        }
        for _ in 0..config.further() {
            up.push(stages.stage(&mut at, (width, true), params, doubling([width; 2]))?);
        }
        // The padding of the last convolution.
        at.1 += 1;
        let last = ConvNd::new([width, outputs], &vec![7; dimension], wide, &mut params.scope(&at.next()))?;
        Ok(Self { inputs, dimension, down, blocks, up, last })
    }

    /// Computes `[batch, out_channels, extents…]` from `x` `[batch, in_channels, extents…]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape or fewer than 4 points along a dim; padding by reflection needs 2 points on the coarsest grid; or an
    /// operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        if shape.len() != self.dimension + 2 || shape[1] != self.inputs || shape[2..].iter().any(|&n| n < 4) {
            let want = format!("[batch, {}, {} extents of at least 4]", self.inputs, self.dimension);
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let mut h = x.shallow_clone();
        for stage in &self.down {
            h = stage.forward(&h, mode)?;
        }
        for block in &self.blocks {
            h = block.forward(&[&h], mode, |block, inputs, mode| block.forward(&inputs[0], mode))?;
        }
        for stage in &self.up {
            h = stage.forward(&h, mode)?;
        }
        Ok(self.last.forward(&h)?)
    }
}

impl<A: Array> Model<A> for Pix2Pix<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}
