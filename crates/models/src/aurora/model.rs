//! Aurora.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::backbone::Backbone;
use super::decoder::Decoder;
use super::encoder::Encoder;
use super::expansion::{Coordinate, LEAD_TIME, LEVEL};
use super::stage::StageOptions;
use super::{AuroraConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;
use crate::windows::product;

/// Aurora: Bodnar et al., *A foundation model for the Earth system*, Nature 641 (2025), arXiv:2405.13063.
///
/// Patches of each level become tokens. A perceiver (Jaegle et al., arXiv:2103.03206) reads those of the pressure levels of a patch
/// column into a few latent levels; the surface is one more. With e for Fourier expansions, S for a stage of blocks and l a block's
/// latents,
///
/// ```text
/// l ← l + norm(attention(l, x)),  l ← l + norm(W₂ gelu(W₁ l))
/// x = [surface, l] + W e(latitude, longitude) + W e(√area) + W e(lead time) + W e(time)
/// xₖ₊₁ = down(Sₖ(xₖ))                       half the rows and columns, twice the features
/// y = up(S(x)),  y ← up(S(y)) + skip, …     back to the first grid, whose skip is joined: twice the features
///
/// block: x ← x + norm(attention(x), c),  x ← x + norm(W₂ gelu(W₁ x), c)     c = W₂ silu(W₁ e(lead time))
/// norm(x, c) = LN(x) · scale + shift,  (shift, scale) = W silu(c) + b
/// ```
///
/// The first level gives the surface; a second perceiver asks the others for each pressure level. Attention is within windows of
/// `window_size`; odd blocks shift them by half a window. Longitudes go round: tokens on both sides of the date line see each other
/// where no margin is between them.
///
/// As in the source:
///
/// - The skip between the coarsest grids is not used; the finest one is used twice if there are three stages.
/// - The area of a patch has the factor π, and that between its first and last points counts.
/// - Its 721 latitudes are cropped to 720 before; here `img_size` is what the model sees.
///
/// Without what only some of its versions have: LoRA, clamped variables, embeddings or heads by level.
///
/// Inputs: `fields` `[batch, channel, row, column]` with `max_history_size` frames, the oldest first, each of the variables at the
/// surface and then each other variable on all levels, and after them the static fields, all normalised; `time` `[batch, 1]` of the
/// last frame, in hours since the start of 1970. Output: the channels of one frame, `lead_time` later.
///
/// State dict: `encoder.{surf,atmos}_token_embeds.{weights.NAME,bias}`, `encoder.level_agg`, `encoder.*_embed`,
/// `backbone.{encoder,decoder}_layers.{i}.blocks.{j}`, `backbone.time_mlp`, `decoder.level_decoder`, `decoder.{surf,atmos}_heads.NAME`.
///
/// ```
/// use isobar_models::{Aurora, AuroraConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = AuroraConfig {
///     img_size: [16, 32],
///     atmos_levels: vec![500.0, 850.0],
///     embed_dim: 8,
///     num_heads: 2,
///     window_size: [2, 2, 4],
///     encoder_depths: vec![1, 1],
///     encoder_num_heads: vec![1, 2],
///     decoder_depths: vec![1, 1],
///     decoder_num_heads: vec![2, 1],
///     ..AuroraConfig::default()
/// };
/// let model = Aurora::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let options = (Kind::Float, Device::Cpu);
/// let fields = Tensor::zeros([1, config.in_channels() as i64, 16, 32], options);
/// let y = model.forward(&fields, &Tensor::full([1, 1], 490_000.0, options), Mode::Eval)?;
/// assert_eq!(y.size(), [1, 4 + 5 * 2, 16, 32]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Aurora<A = Tensor> {
    /// Channels, rows and columns.
    input: [i64; 3],
    encoder: Encoder<A>,
    backbone: Backbone<A>,
    decoder: Decoder<A>,
}

/// Checked sizes.
#[derive(Debug, Clone)]
pub(super) struct Geometry {
    pub(super) rows: i64,
    pub(super) columns: i64,
    degrees: [[f64; 2]; 2],
    pub(super) surface: i64,
    pub(super) statics: i64,
    /// Variables on levels.
    pub(super) upper: i64,
    pub(super) levels: Vec<f64>,
    pub(super) history: i64,
    pub(super) lead_time: f64,
    pub(super) patch: i64,
    pub(super) width: i64,
    pub(super) latent_levels: i64,
    /// Heads of the perceivers.
    pub(super) heads: i64,
    ratio: f64,
    window: [i64; 3],
    /// Stages of the encoder and of the decoder.
    stages: [Vec<Blocks>; 2],
}

/// Blocks of a stage.
#[derive(Debug, Clone)]
struct Blocks {
    heads: i64,
    /// Probability of each to be dropped.
    rates: Vec<f64>,
}

impl Geometry {
    pub(super) fn new(config: &AuroraConfig) -> Result<Self> {
        let check = Checker(MODEL);
        let [rows, columns] = check.extents("img_size", config.img_size)?;
        let patch = check.extent("patch_size", config.patch_size)?;
        check.ensure(patch > 1, || "patch_size is 1, expected 2 or more: a patch has an area".into())?;
        for (name, extent) in [("the number of latitudes", rows), ("the number of longitudes", columns)] {
            check.divisible((name, extent), ("patch_size", patch))?;
        }
        let width = check.extent("embed_dim", config.embed_dim)?;
        check.divisible(("embed_dim", width), ("the number of expansions of a position", 4))?;
        let heads = check.extent("num_heads", config.num_heads)?;
        check.divisible(("embed_dim", width), ("num_heads", heads))?;
        let window = check.extents("window_size", config.window_size)?;
        let latent_levels = check.extent("latent_levels", config.latent_levels)?;
        check.ensure(latent_levels > 1, || {
            "latent_levels is 1, expected 2 or more: one is the surface".into()
        })?;
        check.divisible(("latent_levels", latent_levels), ("the levels of window_size", window[0]))?;
        for (name, depth) in [("enc_depth", config.enc_depth), ("dec_depth", config.dec_depth)] {
            check_depth(name, depth)?;
        }
        check_ranges(config)?;
        let stages = stages(config, width)?;
        let history = check.extent("max_history_size", config.max_history_size)?;
        product(&check, "patch_size", &[history, patch, patch, width])?;
        product(&check, "img_size", &[latent_levels, rows, columns, width << stages[0].len()])?;
        let geometry = Self {
            rows,
            columns,
            degrees: [config.latitudes, config.longitudes],
            surface: check.extent("the number of surf_vars", config.surf_vars.len())?,
            statics: config.static_vars.len() as i64,
            upper: check.extent("the number of atmos_vars", config.atmos_vars.len())?,
            levels: config.atmos_levels.clone(),
            history,
            lead_time: config.lead_time,
            patch,
            width,
            latent_levels,
            heads,
            ratio: config.mlp_ratio,
            window,
            stages,
        };
        let [_, tokens_y, tokens_x] = geometry.grid(geometry.stages() - 1);
        let halved =
            [rows / patch, columns / patch].iter().all(|&tokens| tokens > 1) && tokens_y * tokens_x > 0;
        check.ensure(halved, || {
            format!(
                "img_size is {:?}, expected 2 or more patches of {patch} along both dims",
                config.img_size
            )
        })?;
        Ok(geometry)
    }

    /// Number of grids.
    pub(super) fn stages(&self) -> usize {
        self.stages[0].len()
    }

    /// Channels of a frame.
    pub(super) fn frame(&self) -> i64 {
        self.surface + self.upper * self.levels.len() as i64
    }

    /// Features of the hidden layer behind so many.
    pub(super) fn hidden(&self, width: i64) -> i64 {
        (width as f64 * self.ratio) as i64
    }

    /// Latitudes or longitudes of patches.
    pub(super) fn coordinate(&self, dim: usize) -> Coordinate {
        Coordinate::new(self.degrees[dim], [self.rows, self.columns][dim], self.patch)
    }

    /// Latent levels, rows and columns of tokens, halved so many times.
    pub(super) fn grid(&self, level: usize) -> [i64; 3] {
        let half = |tokens: i64| (0..level).fold(tokens, |tokens, _| (tokens + 1) / 2);
        [self.latent_levels, half(self.rows / self.patch), half(self.columns / self.patch)]
    }

    /// The stage of the encoder on that grid.
    pub(super) fn encoder_stage(&self, level: usize, recomputes: bool) -> StageOptions {
        self.stage(0, (level, level), recomputes)
    }

    /// The stage of the decoder of that number, the first on the coarsest grid.
    pub(super) fn decoder_stage(&self, i: usize, recomputes: bool) -> StageOptions {
        self.stage(1, (i, self.stages() - 1 - i), recomputes)
    }

    fn stage(&self, side: usize, (i, level): (usize, usize), recomputes: bool) -> StageOptions {
        let Blocks { heads, rates: drop_path } = self.stages[side][i].clone();
        let width = self.width << level;
        let (grid, window, hidden) = (self.grid(level), self.window, self.hidden(width));
        StageOptions { grid, width, heads, window, hidden, context: self.width, drop_path, recomputes }
    }

    /// Most scores of a sample's attention.
    pub(super) fn scores(&self) -> u128 {
        let scores = |level| {
            let stage = self.encoder_stage(level, false);
            stage.windows(false).scores(stage.heads)
        };
        (0..self.stages()).map(scores).max().unwrap_or(0)
    }

    /// Numbers of windows of the coarsest grid.
    pub(super) fn coarsest_windows(&self) -> [i64; 3] {
        self.encoder_stage(self.stages() - 1, false).windows(false).counts()
    }
}

/// Checks coordinates, levels, lead time and ratios.
fn check_ranges(config: &AuroraConfig) -> Result<()> {
    let check = Checker(MODEL);
    let within = |name: &str, value: f64, [low, high]: [f64; 2]| {
        check.ensure((low..=high).contains(&value), || {
            format!("{name} is {value}, expected a number from {low} to {high}")
        })
    };
    for (name, ends, range) in
        [("latitudes", config.latitudes, [-90.0, 90.0]), ("longitudes", config.longitudes, [0.0, 360.0])]
    {
        ends.iter().try_for_each(|&end| within(&format!("an end of {name}"), end, range))?;
        check.ensure(ends[0] != ends[1], || format!("{name} are {ends:?}, expected two different ends"))?;
    }
    check.ensure(!config.atmos_levels.is_empty(), || {
        "atmos_levels is empty, expected pressures in hPa".into()
    })?;
    config.atmos_levels.iter().try_for_each(|&level| within("a number of atmos_levels", level, LEVEL))?;
    within("lead_time", config.lead_time, LEAD_TIME)?;
    within("mlp_ratio", config.mlp_ratio, [1.0 / config.embed_dim as f64, 1024.0])?;
    within("dec_mlp_ratio", config.dec_mlp_ratio, [1.0 / config.embed_dim as f64, 1024.0])?;
    let surface = [&config.surf_vars[..], &config.static_vars].concat();
    for (name, list) in [("surf_vars and static_vars", &surface), ("atmos_vars", &config.atmos_vars)] {
        for (i, variable) in list.iter().enumerate() {
            let usable = !variable.is_empty() && !variable.contains('.') && !list[..i].contains(variable);
            check.ensure(usable, || {
                format!("{name} have {variable:?}, expected names that differ and have no dot: parameters are named by them")
            })?;
        }
    }
    Ok(())
}

/// Checks a number of layers, each of which is made.
fn check_depth(name: &str, depth: usize) -> Result<()> {
    const MOST: usize = 10_000;
    let reason = || format!("{name} is {depth}, expected a number from 1 to {MOST}");
    Checker(MODEL).ensure((1..=MOST).contains(&depth), reason)
}

/// Stages of the encoder and of the decoder.
fn stages(config: &AuroraConfig, width: i64) -> Result<[Vec<Blocks>; 2]> {
    let check = Checker(MODEL);
    let count = config.encoder_depths.len();
    check.ensure((2..=16).contains(&count), || {
        format!("encoder_depths has {count} numbers, expected 2 to 16: one for each stage")
    })?;
    check.extent("embed_dim", (width as usize).saturating_mul(1 << count))?;
    let lists = [
        ("encoder_num_heads", config.encoder_num_heads.len()),
        ("decoder_depths", config.decoder_depths.len()),
        ("decoder_num_heads", config.decoder_num_heads.len()),
    ];
    for (name, given) in lists {
        check.ensure(given == count, || {
            format!("{name} has {given} numbers, expected {count}, as encoder_depths has")
        })?;
    }
    let total = |depths: &[usize]| depths.iter().fold(0_usize, |sum, &depth| sum.saturating_add(depth));
    let blocks = total(&config.encoder_depths);
    check.ensure(blocks == total(&config.decoder_depths), || {
        format!(
            "encoder_depths are {blocks} blocks, and decoder_depths {}, expected as many",
            total(&config.decoder_depths)
        )
    })?;
    check.probability("drop_path", config.drop_path)?;
    let side = |name: &str, depths: &[usize], heads: &[usize], coarsest_first: bool| {
        let mut at = 0;
        let stage = |(i, (&depth, &heads)): (usize, (&usize, &usize))| {
            check_depth(&format!("{name}_depths[{i}]"), depth)?;
            let heads = check.extent(&format!("{name}_num_heads[{i}]"), heads)?;
            let level = if coarsest_first { count - 1 - i } else { i };
            let of = format!("{name}_num_heads[{i}]");
            check.divisible(("the number of features", width << level), (&of, heads))?;
            let rate =
                |block: usize| config.drop_path * block as f64 / blocks.saturating_sub(1).max(1) as f64;
            let rates = (at..at + depth).map(rate).collect();
            at += depth;
            Ok(Blocks { heads, rates })
        };
        depths.iter().zip(heads).enumerate().map(stage).collect::<Result<Vec<_>>>()
    };
    Ok([
        side("encoder", &config.encoder_depths, &config.encoder_num_heads, false)?,
        side("decoder", &config.decoder_depths, &config.decoder_num_heads, true)?,
    ])
}

impl<A: Array> Aurora<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0 or too large; fields that the patch, or features that the heads do not divide; lists of other lengths than the
    /// number of stages; coordinates, levels or a lead time out of range; or `params` refuses a parameter.
    pub fn new(config: &AuroraConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let geometry = Geometry::new(config)?;
        let [surface, statics, upper] = [&config.surf_vars[..], &config.static_vars, &config.atmos_vars];
        let names = [surface, statics, upper];
        let encoder = Encoder::new(&geometry, names, config.enc_depth, &mut params.scope("encoder"))?;
        let backbone =
            Backbone::new(&geometry, config.gradient_checkpointing, &mut params.scope("backbone"))?;
        let hidden = (2.0 * geometry.width as f64 * config.dec_mlp_ratio) as i64;
        let decoder = &mut params.scope("decoder");
        let decoder = Decoder::new(&geometry, [surface, upper], (config.dec_depth, hidden), decoder)?;
        let input = [config.in_channels() as i64, geometry.rows, geometry.columns];
        Ok(Self { input, encoder, backbone, decoder })
    }

    /// Computes the next frame `[batch, channel, row, column]` from `x` `[batch, channel, row, column]` and `times` `[batch, 1]`.
    ///
    /// # Errors
    ///
    /// An input of another shape, or an operator fails.
    pub fn forward(&self, x: &A, times: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        if shape.len() != 4 || shape[1..] != self.input {
            let [channels, rows, columns] = self.input;
            let want = format!("[batch, {channels}, {rows}, {columns}]");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        if times.shape() != [shape[0], 1] {
            let want = format!("times [{}, 1]", shape[0]);
            return Err(Error::Input { model: MODEL, got: times.shape(), want });
        }
        let tokens = self.encoder.forward(x, times)?;
        let [surface, upper] = self.decoder.forward(&self.backbone.forward(&tokens, mode)?)?;
        Ok(A::cat(&[&surface, &upper], 1)?)
    }
}

impl<A: Array> Model<A> for Aurora<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let times = batch.require(MODEL, Batch::<A>::TIME)?;
        Ok(Batch::of_fields(self.forward(x, times, mode)?))
    }
}
