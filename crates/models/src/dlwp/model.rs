//! DLWP.

use isobar_array::{Array, Interpolation, Pool, Resize};
use isobar_nn::{ActivationLayer, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::layers::{Bounded, FaceConv, Pair};
use super::{DlwpConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::faces::{Sphere, fold, unfold};
use crate::layers::Recompute;
use crate::model::Model;

/// Deep Learning Weather Prediction on the cubed sphere: Weyn et al., *Improving Data-Driven Global Weather Prediction Using Deep
/// Convolutional Neural Networks on a Cubed Sphere*, arXiv:2003.11927, as PhysicsNeMo builds it.
///
/// A U-Net of `depth` coarser grids. With σ for the activation and its bounds, and conv₃ for convolutions of faces that are padded with
/// one row or column of their neighbours,
///
/// ```text
/// hᵢ = σ(conv₃(σ(conv₃(x))))            nr_initial_channels · 2ⁱ channels
/// x ← means of 2 × 2 points of hᵢ       for i from 0 to depth − 1
/// x ← σ(conv₃(σ(conv₃(x))))
/// x ← [each point of x four times, hᵢ]
/// x ← σ(conv₃(σ(conv₃(x))))             for i from depth − 1 down to 0
/// y = conv₁(x)
/// ```
///
/// Fields are `[batch, channel, 6, n, n]`, n a multiple of 2^`depth`. Faces 0 to 3 are the equator, each joined to
/// the right of the one before; face 4 joins the first row of face 0 and face 5 its last row. Both poles share one
/// set of weights: on face 5 the kernels are mirrored along the last dim. Corners of the padding repeat the end of a
/// neighbour's row (at the poles, column); the third face that meets there is not used.
///
/// State dict: `equatorial_…` and `polar_…`, each with `downsample.{2i, 2i + 1}`, `mid_layers.{0, 1}`, `upsample.{2j, 2j + 1}` from the
/// coarsest grid on, and `last`; `activation_fn.…` of activations with parameters. Weights start as PyTorch's.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::{Dlwp, DlwpConfig, Mode};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = DlwpConfig { nr_initial_channels: 4, ..DlwpConfig::new(2, 3) };
/// let model = Dlwp::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::zeros([1, 2, 6, 8, 8], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 3, 6, 8, 8]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Dlwp<A = Tensor> {
    inputs: i64,
    down: Vec<Recompute<Pair<A>>>,
    middle: Recompute<Pair<A>>,
    up: Vec<Recompute<Pair<A>>>,
    last: FaceConv<A>,
}

impl<A: Array> Dlwp<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A number of channels of 0, `depth` not 1 to 16, bounds in the wrong order, the activation `stan`; or `params` refuses a
    /// parameter.
    pub fn new(config: &DlwpConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let inputs = check.extent("nr_input_channels", config.nr_input_channels)?;
        let outputs = check.extent("nr_output_channels", config.nr_output_channels)?;
        let width = check.extent("nr_initial_channels", config.nr_initial_channels)?;
        config.check_values()?;
        let (depth, recomputes) = (config.depth, config.gradient_checkpointing);
        let activation = ActivationLayer::new(config.activation_fn, &mut params.scope("activation_fn"))?;
        let activation = Bounded { activation, bounds: config.clamp_activation };

        let mut pair = |list: &str, first: usize, channels: [i64; 3]| -> Result<_> {
            let pair = Pair::new((list, first), channels, &activation, params)?;
            Ok(Recompute::new(&format!("{list}.{first}"), pair, recomputes))
        };
        let mut down = Vec::with_capacity(depth);
        for level in 0..depth {
            let before = if level == 0 { inputs } else { width << (level - 1) };
            down.push(pair("downsample", 2 * level, [before, width << level, width << level])?);
        }
        let deepest = width << (depth - 1);
        let middle = pair("mid_layers", 0, [deepest, 2 * deepest, deepest])?;
        let mut up = Vec::with_capacity(depth);
        for (number, level) in (0..depth).rev().enumerate() {
            let own = width << level;
            let next = if level == 0 { own } else { own / 2 };
            up.push(pair("upsample", 2 * number, [2 * own, own, next])?);
        }
        let last = FaceConv::new("last", [width, outputs], 1, params)?;
        Ok(Self { inputs, down, middle, up, last })
    }

    /// Computes `[batch, nr_output_channels, 6, n, n]` from `x` `[batch, nr_input_channels, 6, n, n]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        let multiple = 1_i64 << self.down.len();
        let fits = match *shape.as_slice() {
            [_, channels, 6, n, columns] => {
                channels == self.inputs && n == columns && n > 0 && n % multiple == 0
            }
            _ => false,
        };
        if !fits {
            let want = format!("[batch, {}, 6, n, n] with n a multiple of {multiple}", self.inputs);
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let through = |pair: &Recompute<Pair<A>>, x: &A| {
            pair.forward(&[x], mode, |pair, inputs, _| pair.forward(&inputs[0]))
        };
        let mut x = fold(x)?;
        let mut skips = Vec::with_capacity(self.down.len());
        for pair in &self.down {
            let h = through(pair, &x)?;
            x = h.avg_pool(2, &Pool::new(&[2]))?;
            skips.push(h);
        }
        x = through(&self.middle, &x)?;
        for (pair, skip) in self.up.iter().zip(skips.into_iter().rev()) {
            let above = x.interpolate(&Resize::Scale(vec![2.0]), Interpolation::Nearest, false)?;
            x = through(pair, &A::cat(&[&above, &skip], 1)?)?;
        }
        unfold(&self.last.forward(&x)?, Sphere::Cube.faces())
    }
}

impl<A: Array> Model<A> for Dlwp<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}
