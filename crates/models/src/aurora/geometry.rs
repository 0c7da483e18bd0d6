//! Sizes of the model, checked: grids, stages, and the ranges of coordinates.

use super::expansion::{Coordinate, LEAD_TIME, LEVEL};
use super::stage::StageOptions;
use super::{AuroraConfig, MODEL};
use crate::error::{Checker, Result};
use crate::windows::product;

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
