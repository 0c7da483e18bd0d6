//! Pangu-Weather.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::{MODEL, PanguConfig};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;
use crate::windows::{
    Downsample, EarthStage, PatchEmbed, PatchRecovery, StageOptions, Upsample, centred, drop_rates, patches,
};

/// Variables at the surface.
const SURFACE: i64 = 4;
/// Constant masks of the surface, which are inputs only.
const MASKS: i64 = 3;
/// Variables above the surface.
const VARIABLES: i64 = 5;
/// Pressure levels.
const LEVELS: i64 = 13;
/// Levels of patches: the surface and pairs of pressure levels.
const PATCH_LEVELS: i64 = 1 + (LEVELS + 1) / 2;
/// Points by which windows are shifted, whatever their extents.
const SHIFT: [i64; 3] = [1, 3, 6];
/// Blocks of the outer and of the inner stages.
const BLOCKS: [usize; 2] = [2, 6];

pub(super) const INPUTS: i64 = SURFACE + MASKS + VARIABLES * LEVELS;
pub(super) const OUTPUTS: i64 = SURFACE + VARIABLES * LEVELS;

/// Pangu-Weather: Bi et al., *Accurate medium-range global weather forecasting with 3D neural networks*, Nature 619 (2023),
/// arXiv:2211.02556, as PhysicsNeMo builds it.
///
/// The input has 72 channels: 4 variables at the surface, 3 masks of the surface, and 5 variables on 13 levels each, variable by
/// variable. Patches of the surface and of pairs of levels become 8 levels of tokens x. With S for a stage of blocks,
///
/// ```text
/// s = S₁(x)                                  2 blocks of embed_dim features
/// y = S₃(S₂(down(s)))                        6 blocks each, half the rows and columns, twice the features
/// z = [S₄(up(y)), s]                         2 blocks
/// surface = convᵀ(level 0 of z),  upper air = convᵀ(levels 1 … 7 of z)
///
/// block:  x ← x + attention(norm(x)),  x ← x + W₂ gelu(W₁ norm(x))
/// attention: softmax(q kᵀ / √d + bias + mask) v  within windows of window_size
/// ```
///
/// The bias is trained. It depends on the levels and rows of both tokens, their distance in columns, and the level
/// and row of the window. Odd blocks shift their windows by (1, 3, 6), whatever the extents of a window, and mask
/// tokens that only the shift makes neighbours. In training, blocks are dropped with probabilities that grow to 0.2
/// (Huang et al., arXiv:1603.09382).
///
/// As in PhysicsNeMo:
///
/// - The grid is padded to multiples of the window after the norm, and the padding zeros are keys of the attention.
/// - Longitude is not periodic: columns that wrap around are masked from the others.
/// - Above the surface, an odd number of latitudes is padded by one less than the patch's, and an even number not
///   at all. With patches of 4 latitudes, and fields of 3 modulo 4, patches above the surface start one row before the
///   surface's.
///
/// Outputs: `surface` `[batch, 4, lat, lon]`, `upper_air` `[batch, 5, 13, lat, lon]`, and for training `fields` with both,
/// `[batch, 69, lat, lon]`, in the input's order.
///
/// State dict: `patchembed2d`, `patchembed3d`, `layer{1…4}.blocks.{i}`, `downsample`, `upsample`, `patchrecovery2d`,
/// `patchrecovery3d`. The masks of odd blocks are buffers, `attn_mask`. PhysicsNeMo's `earth_position_index` is not stored.
///
/// ```
/// use isobar_models::{Mode, Pangu, PanguConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = PanguConfig {
///     img_size: [13, 16],
///     embed_dim: 4,
///     num_heads: [1, 2, 2, 1],
///     window_size: [2, 2, 4],
///     ..PanguConfig::default()
/// };
/// let model = Pangu::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::zeros([1, 72, 13, 16], (Kind::Float, Device::Cpu));
/// let [surface, upper_air] = model.forward(&x, Mode::Eval)?;
/// assert_eq!(surface.size(), [1, 4, 13, 16]);
/// assert_eq!(upper_air.size(), [1, 5, 13, 13, 16]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Pangu<A = Tensor> {
    extents: [i64; 2],
    embed_surface: PatchEmbed<A>,
    embed_levels: PatchEmbed<A>,
    stages: [EarthStage<A>; 4],
    downsample: Downsample<A>,
    upsample: Upsample<A>,
    recover_surface: PatchRecovery<A>,
    recover_levels: PatchRecovery<A>,
}

/// Checked sizes.
pub(super) struct Geometry {
    extents: [i64; 2],
    patch: [i64; 3],
    width: i64,
    heads: [i64; 4],
    window: [i64; 3],
    /// Rows and columns of the outer stages.
    grid: [i64; 2],
}

impl Geometry {
    pub(super) fn new(config: &PanguConfig) -> Result<Self> {
        let check = Checker(MODEL);
        let extents = check.extents("img_size", config.img_size)?;
        let patch = check.extents("patch_size", config.patch_size)?;
        let width = check.extent("embed_dim", config.embed_dim)?;
        let heads = check.extents("num_heads", config.num_heads)?;
        let window = check.extents("window_size", config.window_size)?;
        check.ensure(patch[0] == 2, || {
            format!("patch_size is {patch:?}, expected patches of 2 levels: [2, {}, {}]", patch[1], patch[2])
        })?;
        check.ensure(extents[0] % 2 == 1 || extents[0] % patch[1] == 0, || {
            format!(
                "img_size has {} latitudes, expected an odd number or a multiple of the patch's {}",
                extents[0], patch[1]
            )
        })?;
        for (i, (&heads, factor)) in heads.iter().zip([1, 2, 2, 1]).enumerate() {
            let of = format!("num_heads[{i}]");
            check.divisible(("the number of features", factor * width), (&of, heads))?;
        }
        let grid = [patches(extents[0], patch[1]), patches(extents[1], patch[2])];
        Ok(Self { extents, patch, width, heads, window, grid })
    }

    /// Number of windows of the inner stages.
    pub(super) fn inner_windows(&self) -> [i64; 3] {
        self.stage(1, &[], false).window_counts()
    }

    /// Most scores of a sample's attention.
    pub(super) fn scores(&self) -> u128 {
        (0..4).map(|stage| self.stage(stage, &[], false).scores()).max().unwrap_or(0)
    }

    /// Extent of a patch along rows and columns, the greater one.
    pub(super) fn rounding(&self) -> i64 {
        self.patch[1].max(self.patch[2])
    }

    /// The stage of that number.
    pub(super) fn stage<'a>(&self, stage: usize, drop_path: &'a [f64], recomputes: bool) -> StageOptions<'a> {
        let [rows, columns] = self.grid;
        let (grid, width) = match stage {
            1 | 2 => ([PATCH_LEVELS, patches(rows, 2), patches(columns, 2)], 2 * self.width),
            _ => ([PATCH_LEVELS, rows, columns], self.width),
        };
        let (heads, window) = (self.heads[stage], self.window);
        StageOptions { grid, width, heads, window, shift: SHIFT, drop_path, recomputes }
    }
}

impl<A: Array> Pangu<A> {
    /// Names of the outputs of the model as a [`Model`], besides `fields`.
    pub const OUTPUTS: [&'static str; 2] = ["surface", "upper_air"];

    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0 or too large, patches of other than 2 levels, an even number of latitudes that is not a multiple of the
    /// patch's, features that the heads do not divide; or `params` refuses a parameter.
    pub fn new(config: &PanguConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let geometry = Geometry::new(config)?;
        let Geometry { extents, patch, width, .. } = geometry;
        let flat = &patch[1..];
        let embed_surface =
            PatchEmbed::new([SURFACE + MASKS, width], flat, &extents, &mut params.scope("patchembed2d"))?;
        // The remainder of the latitudes is that of the patch's levels.
        let rows = if extents[0] % patch[0] == 0 { 0 } else { patch[1] - 1 };
        let columns = patches(extents[1], patch[2]) * patch[2] - extents[1];
        let margins = vec![centred(LEVELS % 2), centred(rows), centred(columns)];
        let params3d = &mut params.scope("patchembed3d");
        let embed_levels = PatchEmbed::with_margins([VARIABLES, width], &patch, margins, params3d)?;

        let (check, rates) = (Checker(MODEL), drop_rates());
        let (outer, inner) = rates.split_at(BLOCKS[0]);
        let mut stage = |i: usize, rates: &[f64]| {
            let options = geometry.stage(i, rates, config.gradient_checkpointing);
            EarthStage::new(&check, &format!("layer{}.blocks", i + 1), options, params)
        };
        let stages = [stage(0, outer)?, stage(1, inner)?, stage(2, inner)?, stage(3, outer)?];
        let downsample = Downsample::new(width, "linear", &mut params.scope("downsample"))?;
        let upsample =
            Upsample::new(width, geometry.grid, ["linear1", "linear2"], &mut params.scope("upsample"))?;
        let recover_surface =
            PatchRecovery::new([2 * width, SURFACE], flat, &extents, &mut params.scope("patchrecovery2d"))?;
        let volume = [LEVELS, extents[0], extents[1]];
        let params3d = &mut params.scope("patchrecovery3d");
        let recover_levels = PatchRecovery::new([2 * width, VARIABLES], &patch, &volume, params3d)?;
        Ok(Self {
            extents,
            embed_surface,
            embed_levels,
            stages,
            downsample,
            upsample,
            recover_surface,
            recover_levels,
        })
    }

    /// Computes the surface `[batch, 4, lat, lon]` and the upper air `[batch, 5, 13, lat, lon]` from `x` `[batch, 72, lat, lon]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<[A; 2]> {
        let (shape, [rows, columns]) = (x.shape(), self.extents);
        if shape.len() != 4 || shape[1..] != [INPUTS, rows, columns] {
            let want = format!("[batch, {INPUTS}, {rows}, {columns}]");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let x = self.embed(x)?;
        let skip = self.stages[0].forward(&x, mode)?;
        let mut x = self.downsample.forward(&skip)?;
        for stage in &self.stages[1..3] {
            x = stage.forward(&x, mode)?;
        }
        let x = self.stages[3].forward(&self.upsample.forward(&x)?, mode)?;
        let x = A::cat(&[&x, &skip], -1)?;
        let surface = self.recover_surface.forward(&x.select(1, 0)?.permute(&[0, 3, 1, 2])?)?;
        let levels = x.narrow(1, 1, PATCH_LEVELS - 1)?.permute(&[0, 4, 1, 2, 3])?;
        Ok([surface, self.recover_levels.forward(&levels)?])
    }

    /// Tokens `[batch, level, row, column, feature]`.
    fn embed(&self, x: &A) -> Result<A> {
        let (batch, [rows, columns]) = (x.extent(0)?, self.extents);
        let surface = self.embed_surface.forward(&x.narrow(1, 0, SURFACE + MASKS)?)?;
        let levels = x.narrow(1, SURFACE + MASKS, VARIABLES * LEVELS)?;
        let levels = levels.reshape(&[batch, VARIABLES, LEVELS, rows, columns])?;
        let levels = self.embed_levels.forward(&levels)?;
        let tokens = A::cat(&[&surface.unsqueeze(2)?, &levels], 2)?;
        Ok(tokens.permute(&[0, 2, 3, 4, 1])?)
    }
}

impl<A: Array> Model<A> for Pangu<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let [surface, upper_air] = self.forward(x, mode)?;
        let &[samples, _, _, rows, columns] = &upper_air.shape()[..] else {
            return Ok(Batch::of_fields(surface));
        };
        let channels = upper_air.reshape(&[samples, VARIABLES * LEVELS, rows, columns])?;
        let fields = A::cat(&[&surface, &channels], 1)?;
        let [first, second] = Self::OUTPUTS;
        Ok(Batch::of_fields(fields).with(first, surface).with(second, upper_air))
    }
}
