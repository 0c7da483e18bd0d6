//! Encoders and decoders of single variables.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;

use super::{FengwuConfig, MODEL};
use crate::error::{Checker, Result};
use crate::layers::Start;
use crate::windows::{
    Downsample, EarthStage, PatchEmbed, PatchRecovery, StageOptions, Upsample, drop_rates, patches,
};

/// Fields that are encoded by themselves: the surface and five variables above it.
pub(super) const VARIABLES: i64 = 6;
/// Points by which windows are shifted, whatever their extents.
const SHIFT: [i64; 3] = [1, 3, 6];
/// Number of outer blocks of an encoder or decoder; the inner ones are the rest.
const OUTER_BLOCKS: usize = 2;

/// Checked sizes.
#[derive(Debug)]
pub(super) struct Geometry {
    pub(super) extents: [i64; 2],
    pub(super) levels: i64,
    pub(super) width: i64,
    patch: [i64; 2],
    heads: [i64; 2],
    window: [i64; 3],
    /// Rows and columns of the outer blocks.
    grid: [i64; 2],
    recomputes: bool,
}

impl Geometry {
    pub(super) fn new(config: &FengwuConfig) -> Result<Self> {
        let check = Checker(MODEL);
        let extents = check.extents("img_size", config.img_size)?;
        let levels = check.extent("pressure_level", config.pressure_level)?;
        let width = check.extent("embed_dim", config.embed_dim)?;
        let patch = check.extents("patch_size", config.patch_size)?;
        let window = check.extents("window_size", config.window_size)?;
        let [outer, inner, ..] = config.num_heads;
        let heads = check.extents("num_heads", [outer, inner])?;
        check.divisible(("the number of features", width), ("num_heads[0]", heads[0]))?;
        check.divisible(("the number of features", 2 * width), ("num_heads[1]", heads[1]))?;
        let grid = [patches(extents[0], patch[0]), patches(extents[1], patch[1])];
        let recomputes = config.gradient_checkpointing;
        Ok(Self { extents, levels, width, patch, heads, window, grid, recomputes })
    }

    /// Most scores of a sample's attention.
    pub(super) fn scores(&self) -> u128 {
        self.outer(&[]).scores().max(self.inner(1, &[]).scores()).max(self.inner(VARIABLES, &[]).scores())
    }

    /// Extent of a patch along rows and columns, the greater one.
    pub(super) fn rounding(&self) -> i64 {
        self.patch[0].max(self.patch[1])
    }

    /// The outer blocks of a variable.
    pub(super) fn outer<'a>(&self, drop_path: &'a [f64]) -> StageOptions<'a> {
        let [rows, columns] = self.grid;
        StageOptions {
            grid: [1, rows, columns],
            width: self.width,
            heads: self.heads[0],
            window: [1, self.window[1], self.window[2]],
            shift: [0, SHIFT[1], SHIFT[2]],
            drop_path,
            recomputes: self.recomputes,
        }
    }

    /// The inner blocks of one variable, or of several as levels.
    pub(super) fn inner<'a>(&self, variables: i64, drop_path: &'a [f64]) -> StageOptions<'a> {
        let [rows, columns] = self.grid.map(|extent| patches(extent, 2));
        let outer = self.outer(drop_path);
        let (window, shift) = if variables == 1 { (outer.window, outer.shift) } else { (self.window, SHIFT) };
        StageOptions {
            grid: [variables, rows, columns],
            width: 2 * self.width,
            heads: self.heads[1],
            window,
            shift,
            ..outer
        }
    }
}

/// Channels of a variable to tokens on half the grid.
#[derive(Debug)]
pub(super) struct Encoder<A> {
    embed: PatchEmbed<A>,
    blocks: EarthStage<A>,
    downsample: Downsample<A>,
    middle: EarthStage<A>,
}

impl<A: Array> Encoder<A> {
    pub(super) fn new(
        (name, channels): (&str, i64),
        geometry: &Geometry,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let scope = format!("encoder_{name}");
        let Geometry { width, patch, extents, .. } = geometry;
        let embed = &mut params.scope(&format!("{scope}.patchembed2d"));
        let embed = PatchEmbed::new([channels, *width], patch, extents, embed)?;
        let [blocks, middle] = stages(&scope, geometry, params)?;
        let downsample = Downsample::new(
            *width,
            "linear",
            Start::Torch,
            &mut params.scope(&format!("{scope}.downsample")),
        )?;
        Ok(Self { embed, blocks, downsample, middle })
    }

    /// Computes tokens `[batch, 1, rows / 2, columns / 2, 2 · width]` and those on the full grid, `[batch, 1, rows, columns, width]`.
    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<[A; 2]> {
        let tokens = self.embed.forward(x)?.permute(&[0, 2, 3, 1])?.unsqueeze(1)?;
        let skip = self.blocks.forward(&tokens, mode)?;
        Ok([self.middle.forward(&self.downsample.forward(&skip)?, mode)?, skip])
    }
}

/// Tokens on half the grid to channels of a variable.
#[derive(Debug)]
pub(super) struct Decoder<A> {
    middle: EarthStage<A>,
    upsample: Upsample<A>,
    blocks: EarthStage<A>,
    recover: PatchRecovery<A>,
}

impl<A: Array> Decoder<A> {
    pub(super) fn new(
        (name, channels): (&str, i64),
        geometry: &Geometry,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let scope = format!("decoder_{name}");
        let Geometry { width, patch, extents, grid, .. } = geometry;
        let [blocks, middle] = stages(&scope, geometry, params)?;
        let upsample = Upsample::new(
            *width,
            *grid,
            ["linear1", "linear2"],
            Start::Torch,
            &mut params.scope(&format!("{scope}.upsample")),
        )?;
        let recover = &mut params.scope(&format!("{scope}.patchrecovery2d"));
        let recover = PatchRecovery::new([2 * width, channels], patch, extents, recover)?;
        Ok(Self { middle, upsample, blocks, recover })
    }

    /// Computes channels `[batch, channel, lat, lon]` from tokens of the fuser and of the encoder.
    pub(super) fn forward(&self, x: &A, skip: &A, mode: Mode<'_>) -> Result<A> {
        let x = self.upsample.forward(&self.middle.forward(x, mode)?)?;
        let x = A::cat(&[&self.blocks.forward(&x, mode)?, skip], -1)?;
        self.recover.forward(&x.select(1, 0)?.permute(&[0, 3, 1, 2])?)
    }
}

/// The outer and the inner blocks of an encoder or decoder.
fn stages<A: Array>(
    scope: &str,
    geometry: &Geometry,
    params: &mut impl Params<Array = A>,
) -> Result<[EarthStage<A>; 2]> {
    let (check, rates) = (Checker(MODEL), drop_rates());
    let (outer, inner) = rates.split_at(OUTER_BLOCKS);
    let blocks = EarthStage::new(&check, &format!("{scope}.blocks"), geometry.outer(outer), params)?;
    let name = format!("{scope}.blocks_middle");
    Ok([blocks, EarthStage::new(&check, &name, geometry.inner(1, inner), params)?])
}
