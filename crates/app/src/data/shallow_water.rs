//! `isobar data shallow_water`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use isobar_data::generate::{ShallowWaterOptions, shallow_water};
use isobar_data::writer;

use super::{bar, inspect, mended};
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, terminal};

/// Arguments of `isobar data shallow_water`.
#[derive(Debug, Args)]
pub(crate) struct ShallowWaterArgs {
    /// The file to write, in the format of its extension, such as .nc or .zarr; folders that are missing are made
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Length of the flow in days; the last frame is one interval before its end
    #[arg(long, default_value_t = 10)]
    days: usize,
    /// Hours between frames
    #[arg(long, default_value_t = 2)]
    hours: usize,
    /// Largest degree of the model's spherical harmonics
    #[arg(long, default_value_t = 85)]
    truncation: usize,
    /// Number of latitudes of the grid that is written, which has twice as many longitudes
    #[arg(long, default_value_t = 48)]
    latitudes: usize,
    /// Seed of the longitudes and heights of the bumps; without it, they are those of the configurations' data
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs the command.
pub(super) fn run(args: &ShallowWaterArgs) -> Result<Exit> {
    let options = options(args)?;
    let format = writer(None, &args.out)?;
    outputs::check("--out", &[&args.out], &[])?;
    outputs::make_parent(&args.out)?;
    let bar = bar(options.frames as u64, "frames")?;
    shallow_water(&options, &args.out, |ready| bar.set_position(ready as u64)).map_err(mended)?;
    bar.finish_and_clear();
    terminal::line(&inspect::summary(&args.out, format.name())?);
    Ok(Exit::Good)
}

fn options(args: &ShallowWaterArgs) -> Result<ShallowWaterOptions> {
    if !(1..=365).contains(&args.days) {
        return Err(Exit::Usage.because(format!("--days is {}, expected 1 to 365", args.days)).into());
    }
    if args.hours > 24 * args.days / 2 {
        let most = 12 * args.days;
        return Err(Exit::Usage
            .because(format!("--hours is {}, expected at most {most}, for two frames", args.hours))
            .into());
    }
    let options = ShallowWaterOptions {
        truncation: args.truncation,
        // The last day ends with the next frame, as days of other data do.
        frames: (24 * args.days).div_ceil(args.hours.max(1)),
        hours: args.hours,
        latitudes: args.latitudes,
        seed: args.seed,
    };
    options.check().map_err(mended)?;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobar_command::exit;

    fn args(out: PathBuf) -> ShallowWaterArgs {
        ShallowWaterArgs { out, days: 1, hours: 12, truncation: 21, latitudes: 8, seed: None }
    }

    #[test]
    fn the_default_has_ten_days_of_frames() {
        let args =
            ShallowWaterArgs { days: 10, hours: 2, truncation: 85, latitudes: 48, ..args(PathBuf::new()) };
        assert_eq!(options(&args).unwrap(), ShallowWaterOptions::default());
    }

    #[test]
    fn a_small_flow_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("data/flow.nc");
        assert_eq!(run(&args(out.clone())).unwrap(), Exit::Good);
        assert!(out.is_file());
    }

    #[test]
    fn bad_options_are_refused_before_anything_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let made = |name: &str, change: fn(&mut ShallowWaterArgs)| {
            let mut args = args(folder.path().join("data").join(name));
            change(&mut args);
            let error = run(&args).unwrap_err();
            assert_eq!(exit::of(&error), Exit::Usage, "{error}");
            error.to_string()
        };
        assert_eq!(made("flow.nc", |args| args.days = 0), "--days is 0, expected 1 to 365");
        assert!(
            made("flow.nc", |args| args.hours = 0).contains("hours between frames is 0, expected 1 to 24")
        );
        assert!(made("flow.nc", |args| args.truncation = 1000).contains("the truncation is 1000"));
        assert!(made("flow.txt", |_| ()).contains("its extension names no format"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
