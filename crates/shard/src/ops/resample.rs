//! Operators that `isobar-array` makes of others, over any array: their names. Their rules are those of their parts.

use std::collections::BTreeMap;

use isobar_array::{GridSample, Interpolation, Resample, SamplePadding};

use crate::error::Result;
use crate::rules::Call;

crate::register! {
    /// Groups of `upscale_factor`² channels rearranged to `upscale_factor` times as many points along both dims.
    "pixel_shuffle"(input; upscale_factor) Boundaries:
        |call| call.tensor(0)?.pixel_shuffle(call.get("upscale_factor")?);
    /// Squares of `downscale_factor`² points rearranged to channels.
    "pixel_unshuffle"(input; downscale_factor) Boundaries:
        |call| call.tensor(0)?.pixel_unshuffle(call.get("downscale_factor")?);
    /// The dims split, moved and merged as einops' `pattern` says; `extents` gives those that it splits off.
    "rearrange"(input; pattern, extents) Boundaries: |call| {
        let extents: BTreeMap<String, i64> = call.or("extents", BTreeMap::new())?;
        let extents: Vec<(&str, i64)> = extents.iter().map(|(name, &extent)| (&name[..], extent)).collect();
        call.tensor(0)?.rearrange(&call.get::<String>("pattern")?, &extents)
    };
    /// The points of `field`'s grid under the affine maps `theta`.
    "affine_grid"(theta, field; align_corners) Followed:
        |call| call.tensor(0)?.affine_grid(call.tensor(1)?, call.or("align_corners", false)?);
    /// The field at the points of `grid`.
    "grid_sample"(input, grid; mode, padding_mode, align_corners) Samples:
        |call| call.tensor(0)?.grid_sample(call.tensor(1)?, &options(call)?);
}

fn options(call: &Call<'_>) -> Result<GridSample> {
    let interpolation = match &call.word("mode", "bilinear")?[..] {
        "bilinear" => Interpolation::Linear,
        "nearest" => Interpolation::Nearest,
        other => return call.refuse(format!("mode = \"{other}\"; expected bilinear or nearest")),
    };
    let padding = match &call.word("padding_mode", "zeros")?[..] {
        "zeros" => SamplePadding::Zeros,
        "border" => SamplePadding::Border,
        "reflection" => SamplePadding::Reflection,
        other => {
            return call.refuse(format!("padding_mode = \"{other}\"; expected zeros, border or reflection"));
        }
    };
    Ok(GridSample { interpolation, padding, align_corners: call.or("align_corners", false)? })
}
