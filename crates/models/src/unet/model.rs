//! The U-Net.

use isobar_array::{Array, Interpolation, Pool, Resize};
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::grid::{Grid, Side};
use super::layers::{Block, Gate, Upsample};
use super::{MODEL, Pooling, UNetConfig};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::layers::Recompute;
use crate::model::Model;

/// The U-Net: Ronneberger et al., *U-Net: Convolutional Networks for Biomedical Image Segmentation*,
/// arXiv:1505.04597, in three dimensions as PhysicsNeMo builds it, or in two.
///
/// A block is B(x) = σ(norm(conv(x))). With L levels, of one or two blocks each,
///
/// ```text
/// s₀ = B…B(x),   sₗ = B…B(pool(sₗ₋₁))                            down
/// d = s_{L−1},   d ← B…B([up(d), gate(sₗ)])  for l = L−2 … 0     up, concatenated along the channels
/// y = conv(d)
/// ```
///
/// pool takes the maximum or the mean of windows of `pool_size`; up is a transposed convolution of kernel 3
/// and stride 2 that keeps the channels, or an interpolation and a convolution. The gate (Oktay et al.,
/// *Attention U-Net*, arXiv:1804.03999), where there is one, is s · ψ with
///
/// ```text
/// ψ = sigmoid(LN(wᵀ relu(LN(W_g u) + LN(W_x s))))                 at each point, u = up(d)
/// ```
///
/// Its last norm is over a single channel, as PhysicsNeMo has it: so ψ is the sigmoid of that norm's bias
/// everywhere, and the weights inside have no effect.
///
/// Group norm is over channels and space of each sample, batch norm over batch and space. With transposed convolutions, extents must
/// be divisible by `pool_size` to the power of L − 1. With interpolation, up(d) has the extents of sₗ, whatever they are. With
/// `"same"` padding and a stride, only the encoder's convolutions are strided, and the last d is interpolated to the extents of x.
/// With other paddings that change the extents, up(d) must have the extents of sₗ at every level. Weights start as PyTorch's.
///
/// State dict, in `dimension` 3 (in 2 with `conv2d`): `encoder.layers.{j}` and `decoder.layers.{j}`, j
/// counting blocks, poolings and upsamplings, with `conv3d.{weight,bias}` and `norm.{weight,bias}` (of group
/// norm where it is `affine`), for batch norm also `norm.{running_mean,running_var}`;
/// `decoder.layers.{j}.conv3d_transpose.{weight,bias}`, or `conv3d` after an interpolation;
/// `attention_blocks.{l}.{W_g,W_x,psi}.{0,1}.{weight,bias}`, the lowest level first. PhysicsNeMo's further
/// `num_batches_tracked` of batch norms is not there.
///
/// ```
/// use isobar_models::{Mode, UNet, UNetConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config =
///     UNetConfig { model_depth: 2, feature_map_channels: vec![4, 4, 8, 8], ..UNetConfig::new(1, 2) };
/// let model = UNet::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::zeros([1, 1, 8, 6, 4], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 2, 8, 6, 4]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct UNet<A = Tensor> {
    inputs: i64,
    spatial: usize,
    factor: i64,
    grid: Grid,
    pooling: Pooling,
    pool: Pool,
    down: Vec<Blocks<A>>,
    up: Vec<(Upsample<A>, Blocks<A>)>,
    /// As many as `up`, or none.
    gates: Vec<Gate<A>>,
    /// Interpolation of the features that the last convolution gets to the extents of the input.
    resize: Option<Interpolation>,
    last: Block<A>,
}

/// The blocks of a level.
type Blocks<A> = Vec<Recompute<Block<A>>>;

impl<A: Array> UNet<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Arguments that do not fit each other, as their documentation says; a size of 0; or `params` refuses a
    /// parameter.
    pub fn new(config: &UNetConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let plan = config.plan()?;
        let count = config.num_conv_blocks;
        // From the lowest level upwards: what goes up, and what comes beside it.
        let above: Vec<&Vec<i64>> = plan.levels.iter().rev().skip(1).collect();
        let skips: Vec<i64> = above.iter().filter_map(|level| level.last().copied()).collect();
        let below: Vec<i64> = plan.levels.iter().rev().filter_map(|level| level.first().copied()).collect();
        let inner = config.gates(&below[..skips.len()], &skips)?;

        let mut features = plan.inputs;
        let mut down = Vec::with_capacity(plan.levels.len());
        for (level, channels) in plan.levels.iter().enumerate() {
            let mut blocks = Vec::with_capacity(count);
            for (i, &next) in channels.iter().enumerate() {
                // The poolings have numbers too.
                let name = format!("encoder.layers.{}", level * (count + 1) + i);
                let block =
                    Block::new(config, (&plan, Side::Encoder), [features, next], &mut params.scope(&name))?;
                blocks.push(Recompute::new(&name, block, config.gradient_checkpointing));
                features = next;
            }
            down.push(blocks);
        }
        let mut up = Vec::with_capacity(above.len());
        for (level, (channels, skip)) in above.iter().zip(&skips).enumerate() {
            let name = |i: usize| format!("decoder.layers.{}", level * (count + 1) + i);
            let upsample = Upsample::new(config, &plan, features, &mut params.scope(&name(0)))?;
            features += skip;
            let mut blocks = Vec::with_capacity(count);
            for (i, &next) in channels.iter().rev().enumerate() {
                let name = name(i + 1);
                let block =
                    Block::new(config, (&plan, Side::Decoder), [features, next], &mut params.scope(&name))?;
                blocks.push(Recompute::new(&name, block, config.gradient_checkpointing));
                features = next;
            }
            up.push((upsample, blocks));
        }
        let name = format!("decoder.layers.{}", above.len() * (count + 1));
        let last = Block::plain(&plan, [features, plan.outputs], &mut params.scope(&name))?;
        let mut gates = Vec::new();
        if let Some(inner) = inner {
            for (level, (&below, &skip)) in below.iter().zip(&skips).enumerate() {
                let mut params = params.scope(&format!("attention_blocks.{level}"));
                gates.push(Gate::new([below, skip, inner], plan.spatial, &mut params)?);
            }
        }
        let pool = Pool::new(&[plan.pool]);
        let (inputs, spatial, factor, grid) = (plan.inputs, plan.spatial, plan.factor, plan.grid);
        let (pooling, resize) = (config.pooling_type, config.upsampling.interpolation());
        Ok(Self { inputs, spatial, factor, grid, pooling, pool, down, up, gates, resize, last })
    }

    /// The fields `[batch, out_channels, extent…]` for `x` `[batch, in_channels, extent…]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.check(x)?;
        let extents = x.shape()[2..].to_vec();
        let mut x = x.shallow_clone();
        let mut skips = Vec::with_capacity(self.up.len());
        for (level, blocks) in self.down.iter().enumerate() {
            if level > 0 {
                let pooled = match self.pooling {
                    Pooling::Avg => x.avg_pool(self.spatial, &self.pool)?,
                    Pooling::Max => x.max_pool(self.spatial, &self.pool)?.0,
                };
                skips.push(x);
                x = pooled;
            }
            x = through(blocks, &[&x], mode)?;
        }
        for (level, ((upsample, blocks), skip)) in self.up.iter().zip(skips.into_iter().rev()).enumerate() {
            let below = upsample.forward(&x, &skip)?;
            let skip = match self.gates.get(level) {
                Some(gate) => gate.forward(&below, &skip)?,
                None => skip,
            };
            x = through(blocks, &[&below, &skip], mode)?;
        }
        if let Some(mode) = self.resize.filter(|_| self.grid.resizes() && x.shape()[2..] != extents[..]) {
            x = x.interpolate(&Resize::Size(extents), mode, false)?;
        }
        self.last.forward(&x, mode)
    }

    fn check(&self, x: &A) -> Result<()> {
        let shape = x.shape();
        let fits = shape.len() == self.spatial + 2 && shape[1] == self.inputs;
        let extents = if self.spatial == 3 { "depth, height, width" } else { "height, width" };
        if !self.grid.keeps_extents() {
            let output = if fits { self.grid.output(&shape[2..]).err() } else { Some(String::new()) };
            return output.map_or(Ok(()), |reason| {
                let reason =
                    if fits { format!(", which {} fit: {reason}", self.grid.describe()) } else { reason };
                let want = format!("[batch, {}, {extents}]{reason}", self.inputs);
                Err(Error::Input { model: MODEL, got: shape, want })
            });
        }
        if fits && self.grid.accepts(&shape[2..], self.down.len()) {
            return Ok(());
        }
        let want = format!("[batch, {}, {extents}] with {}", self.inputs, self.grid.expected(self.factor));
        Err(Error::Input { model: MODEL, got: shape, want })
    }
}

impl<A: Array> Model<A> for UNet<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}

/// Concatenates `inputs` along the channels.
fn through<A: Array>(blocks: &[Recompute<Block<A>>], inputs: &[&A], mode: Mode<'_>) -> Result<A> {
    let mut x: Option<A> = None;
    for block in blocks {
        let own = x.take();
        let inputs = own.as_ref().map_or_else(|| inputs.to_vec(), |x| vec![x]);
        x = Some(block.forward(&inputs, mode, |block, inputs, mode| match inputs {
            [only] => block.forward(only, mode),
            several => block.forward(&A::cat(&several.iter().collect::<Vec<_>>(), 1)?, mode),
        })?);
    }
    x.map_or_else(|| Ok(A::cat(inputs, 1)?), Ok)
}
