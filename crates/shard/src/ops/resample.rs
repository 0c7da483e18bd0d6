//! Operators that `isobar-array` makes of others, over any array: their names. Their rules are those of their parts.

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
