//! `isobar data`: makes, shows, measures and converts data sets.
//!
//! It reaches formats through their registry alone.

mod coarsen;
mod convert;
mod darcy;
mod inspect;
mod make;
mod open;
mod shallow_water;
mod stats;

use anyhow::Result;
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};

use isobar_command::exit::{Because, Exit};

/// The data sets.
#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Solve Darcy flow for random coefficients and write it as HDF5
    ///
    /// Each sample is a coefficient a, 12 or 3 by the sign of a Gaussian random field, and the solution u of
    /// -div(a grad u) = 1 on the unit square with u = 0 on its boundary. The file has PDEBench's layout: datasets `nu` and
    /// `tensor`, coordinates, the attribute `beta`. The same seed gives the same samples.
    #[command(after_long_help = "\
Example:
  isobar data darcy --out data/darcy.h5 --samples 512 --size 64 --seed 1")]
    Darcy(darcy::DarcyArgs),
    /// Solve the flow of shallow water on the rotating Earth and write it as NetCDF, Zarr or HDF5
    ///
    /// Two jets, one in each hemisphere, break up into eddies: eastward and northward wind `u` and `v` in m/s, and depth `h` in m, over
    /// time, latitude and longitude. A spherical-harmonic transform model solves the equations in float64. Without options
    /// it makes the data of configs/shallow_water.toml, in some minutes.
    #[command(after_long_help = "\
Examples:
  isobar data shallow_water --out runs/data/shallow_water.nc
  isobar data shallow_water --out data/flow.zarr --truncation 170 --latitudes 96 --days 15 --hours 1 --seed 1")]
    #[command(name = "shallow_water")]
    ShallowWater(shallow_water::ShallowWaterArgs),
    /// Solve trajectories of an equation on a periodic box and write them in The Well's schema
    ///
    /// The systems of APEBench (Koehler et al. 2024) and others, solved in Fourier space by exponential Runge-Kutta methods of order 1 to
    /// 4, in float64, from random initial fields. The same seed gives the same samples.
    #[command(after_long_help = "\
Examples:
  The systems:
    isobar data make
  All keys:
    isobar data make --reference
  A hundred trajectories to train on, and ten for validation:
    isobar data make burgers --out data/burgers --set samples=100 --set valid_samples=10 --set system.viscosity=0.02")]
    Make(make::MakeArgs),
    /// Show the variables, shapes, chunks, units and coordinates of a data set, and the bytes that a rank reads of it
    #[command(after_long_help = "\
Examples:
  isobar data inspect data/burgers.h5 --format the_well
  isobar data inspect configs/navier_stokes_fno.toml --mesh 2x2")]
    Inspect(inspect::InspectArgs),
    /// Compute mean, deviation, minimum and maximum of variables and of their changes in time
    ///
    /// In float64, with bounded memory; weighted by cell area where a dim has latitudes. Beside a run, or where --output says, the numbers
    /// are written as JSON.
    #[command(after_long_help = "\
Examples:
  isobar data stats era5.nc
  isobar data stats configs/navier_stokes_fno.toml --output stats.json")]
    Stats(stats::StatsArgs),
    /// Convert a data set to another format
    ///
    /// With bounded memory. The new file takes its name once it is complete. The same command resumes an interrupted conversion, from the
    /// folder `.TARGET.partial`.
    #[command(after_long_help = "\
Examples:
  isobar data convert era5.nc era5.h5
  isobar data convert simulation.h5 simulation.nc --from the_well --chunk time=10,x=64 --deflate 4
  isobar data convert simulation.h5 arrays --from the_well --format npy")]
    Convert(convert::ConvertArgs),
    /// Make pairs for super-resolution: coarse fields interpolated to the fine grid, and the missing detail
    ///
    /// Each frame of each sample becomes a sample without time. For a variable `u`, `u_coarse` is its mean over blocks of points,
    /// interpolated to the fine grid by bicubic convolution, and `u_detail` the difference of both.
    #[command(after_long_help = "\
Example:
  isobar data coarsen data/navier_stokes_64.h5 data/super_resolution.h5 --variables vorticity --factor 4")]
    Coarsen(coarsen::CoarsenArgs),
}

/// Runs the command.
pub(crate) fn run(command: &DataCommand) -> Result<Exit> {
    match command {
        DataCommand::Darcy(args) => darcy::run(args),
        DataCommand::ShallowWater(args) => shallow_water::run(args),
        DataCommand::Make(args) => make::run(args),
        DataCommand::Inspect(args) => inspect::run(args),
        DataCommand::Stats(args) => stats::run(args),
        DataCommand::Convert(args) => convert::run(args),
        DataCommand::Coarsen(args) => coarsen::run(args),
    }
}

/// A bar of things that are done.
fn bar(all: u64, things: &str) -> Result<ProgressBar> {
    let bar = ProgressBar::new(all);
    let template = format!("{{bar:40}} {{pos}}/{{len}} {things}, {{eta}} left");
    bar.set_style(ProgressStyle::with_template(&template)?);
    Ok(bar)
}

/// A bar of bytes.
fn bytes_bar() -> Result<ProgressBar> {
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes}, {eta} left")?);
    Ok(bar)
}

/// An error of a setting as one of the command line.
fn mended(error: isobar_data::Error) -> anyhow::Error {
    match error {
        isobar_data::Error::Invalid(what) => Exit::Usage.because(what).into(),
        error => error.into(),
    }
}
