//! SwinRNN.

use isobar_array::{Array, Conv};
use isobar_nn::{ConvNd, LayerNorm, Linear, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::layers::{ConvBlock, Scale};
use super::stage::{SwinOptions, SwinStage};
use super::{MODEL, SwinRnnConfig};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;

/// Times that the grid is halved.
pub(super) const HALVINGS: usize = 3;
/// Blocks of a stage of the encoder and of the decoder.
pub(super) const BLOCKS: [usize; 2] = [2, 12];

/// SwinRNN: Hu et al., *SwinVRNN: A Data-Driven Ensemble Forecasting Model via Learned Distribution Perturbation*,
/// arXiv:2205.13158, its deterministic part as PhysicsNeMo builds it.
///
/// With x the last time of the input, S for a stage of 2 and D for one of 12 blocks of a Swin transformer (Liu et al.,
/// arXiv:2103.14030), and C for blocks y + σ(N(conv₃(σ(N(conv₃(y)))))) of a convolution y, σ = SiLU, N a group norm,
///
/// ```text
/// h₁ = S₁(norm(conv(input over all times))),   hₖ₊₁ = Sₖ₊₁(C↓(hₖ)),   x₁ = x,   xₖ₊₁ = C↓(xₖ)
/// hₖ ← hₖ + Dₖ(W [xₖ, hₖ])                     k = 1 … 4: each grid with half the rows and columns of the one before
/// u = C↑(h₄),   u ← C↑([h₃, u]),   u ← C↑([h₂, u])
/// y = x + C([h₁, u])
/// ```
///
/// Odd blocks shift their windows by half a window and mask tokens that only the shift makes neighbours. A dim
/// covered by a single window is not shifted. Each stage pads its grid with zeros to multiples of the window, and
/// crops its result.
///
/// As in PhysicsNeMo, the C↓ of the states and the last C normalise each channel by itself, so that the biases of their convolutions
/// have no effect.
///
/// State dict: `cube_embedding.{proj,norm}`, `swin_block{k}`, `swin_decoder{k}` (each `.layer.blocks.{i}`), `lin_proj{k}`, `down{k}`,
/// `down{k}x`, `up{k}x`, `pred`.
///
/// ```
/// use isobar_models::{Mode, SwinRnn, SwinRnnConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = SwinRnnConfig { embed_dim: 4, num_groups: 2, num_heads: 2, window_size: 4, ..SwinRnnConfig::new(2, [16, 24], 3) };
/// let model = SwinRnn::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::zeros([1, 3, 2, 16, 24], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 3, 16, 24]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct SwinRnn<A = Tensor> {
    /// Channels, times, rows and columns.
    input: [i64; 4],
    proj: ConvNd<A>,
    norm: LayerNorm<A>,
    levels: Vec<Level<A>>,
    /// From the coarsest grid to the finest.
    up: Vec<ConvBlock<A>>,
    pred: ConvBlock<A>,
}

/// Parts on one grid.
#[derive(Debug)]
struct Level<A> {
    encoder: SwinStage<A>,
    lin_proj: Linear<A>,
    decoder: SwinStage<A>,
    /// To the next grid, of features and of states.
    down: Option<[ConvBlock<A>; 2]>,
}

/// Checked sizes.
#[derive(Debug)]
pub(super) struct Geometry {
    extents: [i64; 3],
    pub(super) channels: i64,
    groups: i64,
    pub(super) swin: SwinOptions,
}

impl Geometry {
    pub(super) fn new(config: &SwinRnnConfig) -> Result<Self> {
        let check = Checker(MODEL);
        let extents = check.extents("img_size", config.img_size)?;
        let [times, rows, columns] = extents;
        let step = 1 << HALVINGS;
        check.ensure(rows % step == 0 && columns % step == 0, || {
            format!("img_size is {extents:?}, expected rows and columns that are multiples of {step}")
        })?;
        check.ensure(config.patch_size == [config.img_size[0], 1, 1], || {
            format!(
                "patch_size is {:?}, expected all times and single points: [{times}, 1, 1]",
                config.patch_size
            )
        })?;
        let channels = check.extent("in_chans", config.in_chans)?;
        check.ensure(config.in_chans == config.out_chans, || {
            format!(
                "in_chans is {} and out_chans is {}, expected equal numbers: the output is added to the last state",
                config.in_chans, config.out_chans
            )
        })?;
        let width = check.extent("embed_dim", config.embed_dim)?;
        let groups = check.extent("num_groups", config.num_groups)?;
        let heads = check.extent("num_heads", config.num_heads)?;
        let window = check.extent("window_size", config.window_size)?;
        check.divisible(("embed_dim", width), ("num_groups", groups))?;
        check.divisible(("embed_dim", width), ("num_heads", heads))?;
        let recomputes = config.gradient_checkpointing;
        let swin = SwinOptions { grid: [rows, columns], width, heads, window, recomputes };
        Ok(Self { extents, channels, groups, swin })
    }

    /// Sizes of the stages of a level.
    pub(super) fn at(&self, level: usize) -> SwinOptions {
        SwinOptions { grid: self.swin.grid.map(|extent| extent >> level), ..self.swin }
    }

    /// Scores of a sample's attention on the finest grid.
    pub(super) fn scores(&self) -> u128 {
        self.swin.windows(false).scores(self.swin.heads)
    }

    /// Number of windows of the finest grid.
    pub(super) fn windows(&self) -> [i64; 3] {
        self.swin.windows(false).counts()
    }
}

impl<A: Array> SwinRnn<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0 or too large, patches of other than all times and single points, rows or columns that are not multiples of 8,
    /// other output than input channels, features that groups or heads do not divide; or `params` refuses a parameter.
    pub fn new(config: &SwinRnnConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let Geometry { extents, channels, groups, swin } = Geometry::new(config)?;
        let [times, rows, columns] = extents;
        let width = swin.width;
        let patch = [times, 1, 1];
        let conv = Conv { stride: patch.to_vec(), ..Conv::default() };
        let proj = ConvNd::new([channels, width], &patch, conv, &mut params.scope("cube_embedding.proj"))?;
        let norm = LayerNorm::new(&[width], &mut params.scope("cube_embedding.norm"))?;
        let mut levels = Vec::new();
        for level in 0..=HALVINGS {
            let options = SwinOptions { grid: swin.grid.map(|extent| extent >> level), ..swin };
            let k = level + 1;
            let encoder = SwinStage::new(&format!("swin_block{k}"), (&options, BLOCKS[0]), params)?;
            let lin_proj = Linear::new(channels + width, width, &mut params.scope(&format!("lin_proj{k}")))?;
            let decoder = SwinStage::new(&format!("swin_decoder{k}"), (&options, BLOCKS[1]), params)?;
            let mut half = |name: String, channels: i64, groups: i64| {
                ConvBlock::new([channels; 2], groups, Scale::Half, &mut params.scope(&name))
            };
            let down = match level {
                HALVINGS => None,
                _ => {
                    let states = half(format!("down{k}x"), channels, channels)?;
                    Some([half(format!("down{k}"), width, groups)?, states])
                }
            };
            levels.push(Level { encoder, lin_proj, decoder, down });
        }
        let up = (0..HALVINGS)
            .map(|i| {
                let inputs = if i == 0 { width } else { 2 * width };
                let params = &mut params.scope(&format!("up{}x", HALVINGS - i));
                ConvBlock::new([inputs, width], groups, Scale::Double, params)
            })
            .collect::<Result<_>>()?;
        let pred = ConvBlock::new([2 * width, channels], channels, Scale::Same, &mut params.scope("pred"))?;
        Ok(Self { input: [channels, times, rows, columns], proj, norm, levels, up, pred })
    }

    /// Computes the next state `[batch, channel, row, column]` from the last ones, `x` `[batch, channel, time, row, column]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let (shape, [channels, times, rows, columns]) = (x.shape(), self.input);
        if shape.len() != 5 || shape[1..] != self.input {
            let want = format!("[batch, {channels}, {times}, {rows}, {columns}]");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let last = x.select(2, times - 1)?;
        let tokens = self.proj.forward(x)?.select(2, 0)?.permute(&[0, 2, 3, 1])?;
        let mut h = self.norm.forward(&tokens)?.permute(&[0, 3, 1, 2])?;
        let mut state = last.shallow_clone();
        let mut levels = Vec::with_capacity(self.levels.len());
        for level in &self.levels {
            h = level.encoder.forward(&h, mode)?;
            levels.push(level.decode(&state, &h, mode)?);
            if let Some([down, down_state]) = &level.down {
                h = down.forward(&h)?;
                state = down_state.forward(&state)?;
            }
        }
        let mut u = None;
        for (h, up) in levels[1..].iter().rev().zip(&self.up) {
            let joined = match &u {
                None => h.shallow_clone(),
                Some(u) => A::cat(&[h, u], 1)?,
            };
            u = Some(up.forward(&joined)?);
        }
        let Some(u) = u else { return Ok(last) };
        Ok(last.add(&self.pred.forward(&A::cat(&[&levels[0], &u], 1)?)?)?)
    }
}

impl<A: Array> Level<A> {
    /// Computes h + D(W [x, h]) from the state x and the features h of this grid.
    fn decode(&self, x: &A, h: &A, mode: Mode<'_>) -> Result<A> {
        let joined = A::cat(&[x, h], 1)?.permute(&[0, 2, 3, 1])?;
        let mixed = self.lin_proj.forward(&joined)?.permute(&[0, 3, 1, 2])?;
        Ok(h.add(&self.decoder.forward(&mixed, mode)?)?)
    }
}

impl<A: Array> Model<A> for SwinRnn<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        // Fields of one time need no dim for it.
        let y =
            if x.shape().len() == 4 { self.forward(&x.unsqueeze(2)?, mode)? } else { self.forward(x, mode)? };
        Ok(Batch::of_fields(y))
    }
}
