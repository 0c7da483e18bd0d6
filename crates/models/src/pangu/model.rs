//! Pangu-Weather.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::{MODEL, PanguConfig};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::layers::Start;
use crate::model::Model;
use crate::windows::{
    Downsample, EarthStage, PatchEmbed, PatchRecovery, StageOptions, Upsample, centred, drop_rates, patches,
};

/// Points by which windows are shifted, whatever their extents.
const SHIFT: [i64; 3] = [1, 3, 6];
/// Blocks of the outer and of the inner stages.
const BLOCKS: [usize; 2] = [2, 6];

/// Pangu-Weather: Bi et al., *Accurate medium-range global weather forecasting with 3D neural networks*, Nature 619 (2023),
/// arXiv:2211.02556, as PhysicsNeMo builds it.
///
/// The input has by default 72 channels: 4 variables at the surface, 3 masks of the surface, and 5 variables on 13 levels each,
/// variable by variable. Patches of the surface and of pairs of levels become 8 levels of tokens x. With S for a stage of blocks,
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
/// `[batch, 69, lat, lon]`, in the input's order. Without pressure levels (`pressure_levels = 0`), for fluids of one layer, the
/// network has the surface's tokens only and no `upper_air`.
///
/// State dict: `patchembed2d`, `patchembed3d`, `layer{1…4}.blocks.{i}`, `downsample`, `upsample`, `patchrecovery2d`,
/// `patchrecovery3d`. The masks of odd blocks, `attn_mask`, are computed, not stored. PhysicsNeMo's `earth_position_index` is
/// left out.
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
/// let (surface, upper_air) = model.forward(&x, Mode::Eval)?;
/// assert_eq!(surface.size(), [1, 4, 13, 16]);
/// assert_eq!(upper_air.map(|levels| levels.size()), Some(vec![1, 5, 13, 13, 16]));
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Pangu<A = Tensor> {
    extents: [i64; 2],
    channels: Channels,
    embed_surface: PatchEmbed<A>,
    embed_levels: Option<PatchEmbed<A>>,
    stages: [EarthStage<A>; 4],
    downsample: Downsample<A>,
    upsample: Upsample<A>,
    recover_surface: PatchRecovery<A>,
    recover_levels: Option<PatchRecovery<A>>,
}

/// Checked numbers of channels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Channels {
    /// Variables at the surface.
    surface: i64,
    /// Channels of the surface that are inputs only.
    masks: i64,
    /// Variables above the surface; 0 without levels.
    variables: i64,
    /// Pressure levels of each; 0 without an atmosphere above the surface.
    levels: i64,
}

impl Channels {
    fn new(config: &PanguConfig) -> Result<Self> {
        let check = Checker(MODEL);
        let [masks, levels] =
            [("surface_masks", config.surface_masks), ("pressure_levels", config.pressure_levels)]
                .map(|(key, count)| if count == 0 { Ok(0) } else { check.extent(key, count) });
        let (masks, levels) = (masks?, levels?);
        let surface = check.extent("surface_variables", config.surface_variables)?;
        let variables = match levels {
            0 => 0,
            _ => check.extent("upper_air_variables", config.upper_air_variables)?,
        };
        Ok(Self { surface, masks, variables, levels })
    }

    /// Channels of the input.
    pub(super) fn inputs(&self) -> i64 {
        self.outputs() + self.masks
    }

    /// Channels of the output.
    pub(super) fn outputs(&self) -> i64 {
        self.surface + self.upper_air()
    }

    /// Channels above the surface.
    fn upper_air(&self) -> i64 {
        self.variables * self.levels
    }

    /// Levels of patches: the surface and pairs of pressure levels.
    fn patch_levels(&self) -> i64 {
        1 + (self.levels + 1) / 2
    }
}

/// Checked sizes.
pub(super) struct Geometry {
    pub(super) channels: Channels,
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
        let channels = Channels::new(config)?;
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
        Ok(Self { channels, extents, patch, width, heads, window, grid })
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

    /// Embedding of the pressure levels.
    fn embed_levels<A: Array>(&self, params: &mut impl Params<Array = A>) -> Result<PatchEmbed<A>> {
        let Self { channels, extents, patch, width, .. } = self;
        // The remainder of the latitudes is that of the patch's levels.
        let rows = if extents[0] % patch[0] == 0 { 0 } else { patch[1] - 1 };
        let columns = patches(extents[1], patch[2]) * patch[2] - extents[1];
        let margins = vec![centred(channels.levels % 2), centred(rows), centred(columns)];
        PatchEmbed::with_margins([channels.variables, *width], patch, margins, params)
    }

    /// Fields on pressure levels from tokens.
    fn recover_levels<A: Array>(&self, params: &mut impl Params<Array = A>) -> Result<PatchRecovery<A>> {
        let volume = [self.channels.levels, self.extents[0], self.extents[1]];
        PatchRecovery::new([2 * self.width, self.channels.variables], &self.patch, &volume, params)
    }

    /// The stage of that number.
    pub(super) fn stage<'a>(&self, stage: usize, drop_path: &'a [f64], recomputes: bool) -> StageOptions<'a> {
        let ([rows, columns], levels) = (self.grid, self.channels.patch_levels());
        let (grid, width) = match stage {
            1 | 2 => ([levels, patches(rows, 2), patches(columns, 2)], 2 * self.width),
            _ => ([levels, rows, columns], self.width),
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
        let Geometry { channels, extents, patch, width, .. } = geometry;
        let flat = &patch[1..];
        let surface = [channels.surface + channels.masks, width];
        let embed_surface = PatchEmbed::new(surface, flat, &extents, &mut params.scope("patchembed2d"))?;
        let embed_levels = match channels.levels {
            0 => None,
            _ => Some(geometry.embed_levels(&mut params.scope("patchembed3d"))?),
        };

        let (check, rates) = (Checker(MODEL), drop_rates());
        let (outer, inner) = rates.split_at(BLOCKS[0]);
        let mut stage = |i: usize, rates: &[f64]| {
            let options = geometry.stage(i, rates, config.gradient_checkpointing);
            EarthStage::new(&check, &format!("layer{}.blocks", i + 1), options, params)
        };
        let stages = [stage(0, outer)?, stage(1, inner)?, stage(2, inner)?, stage(3, outer)?];
        let downsample = Downsample::new(width, "linear", Start::Torch, &mut params.scope("downsample"))?;
        let upsample = Upsample::new(
            width,
            geometry.grid,
            ["linear1", "linear2"],
            Start::Torch,
            &mut params.scope("upsample"),
        )?;
        let recover_surface = PatchRecovery::new(
            [2 * width, channels.surface],
            flat,
            &extents,
            &mut params.scope("patchrecovery2d"),
        )?;
        let recover_levels = match channels.levels {
            0 => None,
            _ => Some(geometry.recover_levels(&mut params.scope("patchrecovery3d"))?),
        };
        Ok(Self {
            extents,
            channels,
            embed_surface,
            embed_levels,
            stages,
            downsample,
            upsample,
            recover_surface,
            recover_levels,
        })
    }

    /// Computes the surface `[batch, 4, lat, lon]` and the upper air `[batch, 5, 13, lat, lon]` from `x` `[batch, 72, lat, lon]`;
    /// without pressure levels the surface only.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<(A, Option<A>)> {
        let (shape, [rows, columns], inputs) = (x.shape(), self.extents, self.channels.inputs());
        if shape.len() != 4 || shape[1..] != [inputs, rows, columns] {
            let want = format!("[batch, {inputs}, {rows}, {columns}]");
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
        let Some(recover_levels) = &self.recover_levels else { return Ok((surface, None)) };
        let levels = x.narrow(1, 1, self.channels.patch_levels() - 1)?.permute(&[0, 4, 1, 2, 3])?;
        Ok((surface, Some(recover_levels.forward(&levels)?)))
    }

    /// Tokens `[batch, level, row, column, feature]`.
    fn embed(&self, x: &A) -> Result<A> {
        let (batch, [rows, columns], channels) = (x.extent(0)?, self.extents, self.channels);
        let at_surface = channels.surface + channels.masks;
        let surface = self.embed_surface.forward(&x.narrow(1, 0, at_surface)?)?.unsqueeze(2)?;
        let tokens = match &self.embed_levels {
            None => surface,
            Some(embed_levels) => {
                let levels = x.narrow(1, at_surface, channels.upper_air())?;
                let levels = levels.reshape(&[batch, channels.variables, channels.levels, rows, columns])?;
                A::cat(&[&surface, &embed_levels.forward(&levels)?], 2)?
            }
        };
        Ok(tokens.permute(&[0, 2, 3, 4, 1])?)
    }
}

impl<A: Array> Model<A> for Pangu<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let [first, second] = Self::OUTPUTS;
        let (surface, upper_air) = self.forward(x, mode)?;
        let Some(upper_air) = upper_air else {
            return Ok(Batch::of_fields(surface.shallow_clone()).with(first, surface));
        };
        let &[samples, _, _, rows, columns] = &upper_air.shape()[..] else {
            return Ok(Batch::of_fields(surface));
        };
        let channels = upper_air.reshape(&[samples, self.channels.upper_air(), rows, columns])?;
        let fields = A::cat(&[&surface, &channels], 1)?;
        Ok(Batch::of_fields(fields).with(first, surface).with(second, upper_air))
    }
}
