//! The super-resolution residual network.

use isobar_array::Array;
use isobar_nn::{Activation, ActivationLayer, ConvNd, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::layers::{Normed, Residual, Shuffle, padded};
use super::{MODEL, SPATIAL, SrResNetConfig, SrResNetPadding, TAKES_EVEN};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::layers::Recompute;
use crate::model::Model;

/// The super-resolution residual network in three dimensions: Ledig et al., *Photo-Realistic Single Image
/// Super-Resolution Using a Generative Adversarial Network*, arXiv:1609.04802, as PhysicsNeMo builds it.
///
/// With N for batch norm, σ for the activation and conv for convolutions that keep the extents,
///
/// ```text
/// r = σ(conv(x)),   h = r
/// h ← h + N(conv(σ(N(conv(h)))))            n_resid_blocks times
/// h ← r + N(conv(h))
/// h ← prelu(shuffle(conv(h)))               log₂ scaling_factor times
/// y = conv(h)
/// ```
///
/// shuffle makes c channels of twice the extents from 8 c: channel ((c·2 + a)·2 + b)·2 + d at (z, y, x) is
/// channel c at (2z + a, 2y + b, 2x + d) (Shi et al., arXiv:1609.05158). Weights start as PyTorch's, slopes
/// of the PReLU with 0.25.
///
/// State dict: `conv_block1.conv_block.0`, `residual_blocks.{i}.conv_layers.{0,1}.conv_block.0`,
/// `conv_block2.conv_block.0`, `subpixel_convolutional_blocks.{i}.conv` and `conv_block3.conv_block.0`, each
/// with `{weight,bias}`; `….conv_block.1.{weight,bias,running_mean,running_var}` of the batch norms
/// (PhysicsNeMo's further `num_batches_tracked` is not there);
/// `subpixel_convolutional_blocks.{i}.prelu.weight`; the activation's, `conv_block1.activation_fn.weight`,
/// tied to `residual_blocks.{i}.conv_layers.0.activation_fn.weight`.
///
/// ```
/// use isobar_models::{Mode, SrResNet, SrResNetConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = SrResNetConfig {
///     conv_layer_size: 4,
///     n_resid_blocks: 1,
///     scaling_factor: 2,
///     ..SrResNetConfig::new(1, 2)
/// };
/// let model = SrResNet::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::zeros([1, 1, 3, 4, 5], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 2, 6, 8, 10]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct SrResNet<A = Tensor> {
    inputs: i64,
    activation: ActivationLayer<A>,
    first: ConvNd<A>,
    residual: Vec<Recompute<Residual<A>>>,
    middle: Normed<A>,
    shuffles: Vec<Shuffle<A>>,
    last: ConvNd<A>,
}

impl<A: Array> SrResNet<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0, a small kernel even without `padding` `same`, `scaling_factor` not 2, 4 or 8, the activation `stan`; or `params` refuses
    /// a parameter.
    pub fn new(config: &SrResNetConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.out_channels)?;
        let width = check.extent("conv_layer_size", config.conv_layer_size)?;
        let large = check.extent("large_kernel_size", config.large_kernel_size)?;
        let small = check.extent("small_kernel_size", config.small_kernel_size)?;
        let padding = config.padding;
        check.ensure(small % 2 == 1 || padding == SrResNetPadding::Same, || {
            format!("small_kernel_size is {small}, expected an odd number; {TAKES_EVEN}")
        })?;
        let scale = config.scaling_factor;
        check.ensure(matches!(scale, 2 | 4 | 8), || {
            format!("scaling_factor is {scale}, expected 2, 4 or 8")
        })?;
        check.ensure(config.activation_fn != Activation::Stan, || {
            "activation_fn is stan, which is for single features".into()
        })?;

        const ACTIVATION: &str = "conv_block1.activation_fn";
        let activation = ActivationLayer::new(config.activation_fn, &mut params.scope(ACTIVATION))?;
        let first = padded([inputs, width], large, padding, &mut params.scope("conv_block1.conv_block.0"))?;
        let mut residual = Vec::with_capacity(config.n_resid_blocks);
        for i in 0..config.n_resid_blocks {
            let name = |j: usize| format!("residual_blocks.{i}.conv_layers.{j}");
            let mut layer =
                |j: usize| Normed::new(width, small, &mut params.scope(&format!("{}.conv_block", name(j))));
            let block =
                Residual { first: layer(0)?, activation: activation.shallow_clone(), second: layer(1)? };
            residual.push(Recompute::new(
                &format!("residual_blocks.{i}"),
                block,
                config.gradient_checkpointing,
            ));
            activation.tie(&format!("{}.activation_fn", name(0)), ACTIVATION, params)?;
        }
        let middle = Normed::new(width, small, &mut params.scope("conv_block2.conv_block"))?;
        let shuffles = (0..scale.ilog2())
            .map(|i| {
                let mut params = params.scope(&format!("subpixel_convolutional_blocks.{i}"));
                Shuffle::new(width, small, &mut params)
            })
            .collect::<Result<_>>()?;
        let last = padded([width, outputs], large, padding, &mut params.scope("conv_block3.conv_block.0"))?;
        Ok(Self { inputs, activation, first, residual, middle, shuffles, last })
    }

    /// The fields `[batch, out_channels, s·depth, s·height, s·width]`, s = `scaling_factor`, for `x`
    /// `[batch, in_channels, depth, height, width]`. With an even `large_kernel_size` and `padding` `half` there are s + 1 more points
    /// along each dim, as in PhysicsNeMo.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        if shape.len() != SPATIAL + 2 || shape[1] != self.inputs || shape[2..].contains(&0) {
            let want = format!("[batch, {}, depth, height, width]", self.inputs);
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let r = self.activation.forward(&self.first.forward(x)?)?;
        let mut h = r.shallow_clone();
        for block in &self.residual {
            h = block.forward(&[&h], mode, |block, inputs, mode| block.forward(&inputs[0], mode))?;
        }
        h = self.middle.forward(&h, mode)?.add(&r)?;
        for shuffle in &self.shuffles {
            h = shuffle.forward(&h)?;
        }
        Ok(self.last.forward(&h)?)
    }
}

impl<A: Array> Model<A> for SrResNet<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}
