//! Writes the flow.

use std::f64::consts::PI;
use std::path::Path;

use isobar_array::{Generator, Window};
use tch::{Device, Kind, Tensor};

use super::jets::{Bump, start};
use super::model::{DEPTH, Model, inverse_laplacian, wind};
use super::transform::Grid;
use crate::attributes::TextAttributes;
use crate::calendar::TimeUnit;
use crate::content::{Content, Storage};
use crate::dataset_writer::DatasetWriter;
use crate::grid::{DataVariable, Dim, PredictionMeta};
use crate::writers::writer;
use crate::{Error, Result};

/// Options of [`shallow_water`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShallowWaterOptions {
    /// Largest degree of the spherical harmonics of the model, 21 to 255.
    pub truncation: usize,
    /// Number of frames, including the initial state: 1 to 100 000.
    pub frames: usize,
    /// Hours between frames, 1 to 24.
    pub hours: usize,
    /// Latitudes of the grid that is written, 4 to 720; it has twice as many longitudes.
    pub latitudes: usize,
    /// Seed of the longitudes and heights of the bumps; without it, they are 120 m at 0° E in the north, and 90 m at 140° E in the
    /// south.
    pub seed: Option<u64>,
}

impl Default for ShallowWaterOptions {
    /// Ten days at T85, every two hours on 48 × 96 points.
    fn default() -> Self {
        Self { truncation: 85, frames: 120, hours: 2, latitudes: 48, seed: None }
    }
}

impl ShallowWaterOptions {
    /// Checks the numbers.
    ///
    /// # Errors
    /// A number outside of its range.
    pub fn check(&self) -> Result<()> {
        let ranges = [
            ("the truncation", self.truncation, 21..=255),
            ("the number of frames", self.frames, 1..=100_000),
            ("the number of hours between frames", self.hours, 1..=24),
            ("the number of latitudes", self.latitudes, 4..=720),
        ];
        match ranges.into_iter().find(|(_, value, range)| !range.contains(value)) {
            None => Ok(()),
            Some((what, value, range)) => Err(Error::Invalid(format!(
                "{what} is {value}, expected {} to {}",
                range.start(),
                range.end()
            ))),
        }
    }

    /// Largest degree that is written: those from the number of latitudes on would be aliases of lower ones.
    fn written_truncation(&self) -> usize {
        self.truncation.min(self.latitudes - 1)
    }

    /// Number of time steps between frames: of 240 s at T85, in inverse proportion to the truncation.
    fn substeps(&self) -> usize {
        (self.hours * 3600 * self.truncation).div_ceil(240 * 85)
    }

    /// Coefficient of hyperdiffusion in m⁴/s: 10¹⁵ at T85, and such that the shortest waves decay as fast at other truncations.
    fn hyperdiffusion(&self) -> f64 {
        let degrees = |truncation: usize| (truncation * (truncation + 1)) as f64;
        1e15 * (degrees(85) / degrees(self.truncation)).powi(2)
    }

    fn bumps(&self) -> Result<[Bump; 2]> {
        let mut bumps = [(45.0, 0.0, 120.0), (-45.0, 140.0, 90.0)].map(
            |(latitude, longitude, height): (f64, f64, f64)| Bump {
                latitude: latitude.to_radians(),
                longitude: longitude.to_radians(),
                height,
            },
        );
        if let Some(seed) = self.seed {
            let generator = Generator::new(seed).fork("shallow_water");
            let drawn = generator.uniform(&Window::whole(&[4]), 0.0, 1.0, (Kind::Double, Device::Cpu))?;
            let drawn = Vec::<f64>::try_from(drawn)?;
            for (bump, drawn) in bumps.iter_mut().zip(drawn.chunks(2)) {
                bump.longitude = 2.0 * PI * drawn[0];
                bump.height *= 0.5 + drawn[1];
            }
        }
        Ok(bumps)
    }
}

/// Solves the shallow-water equations on the rotating Earth, from two jets that become unstable, and writes the flow: `u` and `v` in
/// m s⁻¹ and `h` in m over time, latitude from north to south, and longitude. The extension of `path` chooses the format
/// ([`writer`](crate::writer)), such as NetCDF for `.nc` and Zarr for `.zarr`.
///
/// ζ' = −∇·((ζ + f) V), δ' = k·∇×((ζ + f) V) − Δ(g h + |V|²/2), h' = −∇·(h V), on a sphere with Earth's radius and rotation and a flat
/// bottom, with a mean depth of 10 km. A spherical-harmonic transform model solves them in float64, with the classical Runge–Kutta method
/// of order 4. Time steps are 240 s at T85, in inverse proportion to the truncation, and there the hyperdiffusion is 10¹⁵ m⁴/s. The start has jets of 80 m/s at 45° N and 60 m/s at
/// 45° S, in balance with the depth, and a bump in each (Galewsky, Scott and Polvani, Tellus A 56, 2004). Frames hold the harmonics of
/// degrees below the number of latitudes, as float32.
///
/// `progress` is called after each frame, with the number of frames that are written. A file of the same name is replaced once the new
/// one is complete; a folder, such as a Zarr store, is an error. Call on one rank.
///
/// ```
/// use isobar_data::generate::{ShallowWaterOptions, shallow_water};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("flow.nc");
/// let options = ShallowWaterOptions { truncation: 21, frames: 2, hours: 12, latitudes: 16, seed: None };
/// let mut ready = 0;
/// shallow_water(&options, &path, |frames| ready = frames)?;
/// assert_eq!(ready, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Options outside of their ranges, an extension that no format has, a folder that is missing, or a full disk.
pub fn shallow_water(
    options: &ShallowWaterOptions,
    path: impl AsRef<Path>,
    mut progress: impl FnMut(usize),
) -> Result<()> {
    options.check()?;
    let path = path.as_ref();
    let mut target = writer(None, path)?.create(path, &content(options))?;
    let substeps = options.substeps();
    let dt = (options.hours * 3600) as f64 / substeps as f64;
    let model = Model::new(options.truncation, dt, options.hyperdiffusion())?;
    let output = Output::new(options)?;
    let mut state = start(&model, &options.bumps()?)?;
    for frame in 0..options.frames {
        for _ in 0..if frame == 0 { 0 } else { substeps } {
            state = model.step(&state)?;
        }
        output.write(&mut *target, frame, &state)?;
        progress(frame + 1);
    }
    target.finish()
}

/// The grid that is written.
struct Output {
    truncation: usize,
    grid: Grid,
    inverse_laplacian: Tensor,
    /// 1 / cos φ, `[latitude, 1]`.
    secant: Tensor,
}

impl Output {
    fn new(options: &ShallowWaterOptions) -> Result<Self> {
        let truncation = options.written_truncation();
        let angles: Vec<f64> = latitudes(options.latitudes).into_iter().map(f64::to_radians).collect();
        let sines: Vec<f64> = angles.iter().map(|angle| angle.sin()).collect();
        let secants: Vec<f64> = angles.iter().map(|angle| 1.0 / angle.cos()).collect();
        Ok(Self {
            truncation,
            grid: Grid::new(truncation, &sines, 2 * options.latitudes)?,
            inverse_laplacian: inverse_laplacian(truncation)?,
            secant: Tensor::f_from_slice(&secants)?.f_unsqueeze(1)?,
        })
    }

    fn write(&self, target: &mut dyn DatasetWriter, frame: usize, state: &Tensor) -> Result<()> {
        let [wind, depth] = self.fields(state)?;
        for (variable, values) in ["u", "v", "h"].into_iter().zip([wind.f_get(0)?, wind.f_get(1)?, depth]) {
            let values = values.f_to_kind(Kind::Float)?.f_unsqueeze(0)?.f_unsqueeze(0)?;
            target.write(variable, 0, frame, &values)?;
        }
        Ok(())
    }

    /// Evaluates the wind, `[2, latitude, longitude]`, and the depth, `[latitude, longitude]`.
    fn fields(&self, state: &Tensor) -> Result<[Tensor; 2]> {
        let degrees = self.truncation as i64 + 1;
        let state = state.f_narrow(1, 0, degrees)?.f_narrow(2, 0, degrees)?;
        let wind = wind(&self.grid, &self.inverse_laplacian, &state)?.f_mul(&self.secant)?;
        Ok([wind, self.grid.fields(&state.f_narrow(0, DEPTH, 1)?)?.f_get(0)?])
    }
}

/// Latitudes in degrees, from north to south, without the poles.
fn latitudes(count: usize) -> Vec<f64> {
    (0..count).map(|at| 90.0 - 180.0 * (at as f64 + 0.5) / count as f64).collect()
}

fn content(options: &ShallowWaterOptions) -> Content {
    let longitudes = 2 * options.latitudes;
    let dim = |name: &str, unit: &str, coordinates, periodic| Dim {
        name: name.to_owned(),
        unit: Some(unit.to_owned()),
        coordinates,
        periodic,
    };
    let standard = |name: &str| match name {
        "u" => Some("eastward_wind".to_owned()),
        "v" => Some("northward_wind".to_owned()),
        _ => None,
    };
    let variable = |name: &str, unit: &str, title: &str| DataVariable {
        unit: Some(unit.to_owned()),
        title: Some(title.to_owned()),
        attributes: TextAttributes::standard_name(standard(name)),
        ..DataVariable::scalar(name)
    };
    let variables = vec![
        variable("u", "m s**-1", "U component of wind"),
        variable("v", "m s**-1", "V component of wind"),
        variable("h", "m", "Depth of the fluid layer (flat bottom)"),
    ];
    let source = format!(
        "isobar data shallow_water: spectral transform model T{}, truncated to T{}",
        options.truncation,
        options.written_truncation()
    );
    let bumps = options.seed.map_or_else(|| "45 N 0 E, 45 S 140 E".to_owned(), |seed| format!("seed {seed}"));
    Content {
        meta: PredictionMeta {
            name: "Rotating shallow water on the sphere: two perturbed mid-latitude jets".to_owned(),
            variables: variables.iter().map(|variable| variable.name.clone()).collect(),
            samples: 1,
            times: (0..options.frames).map(|frame| (frame * options.hours) as f64).collect(),
            sample_times: Vec::new(),
            sample_numbers: Vec::new(),
            attributes: vec![("source".to_owned(), source), ("bumps".to_owned(), bumps)],
            missing: false,
            left_out: Vec::new(),
        },
        time_unit: Some(TimeUnit {
            unit: "hours since 2000-01-01 00:00:00".to_owned(),
            calendar: Some("proleptic_gregorian".to_owned()),
        }),
        dims: vec![
            dim("latitude", "degrees_north", latitudes(options.latitudes), false),
            dim(
                "longitude",
                "degrees_east",
                (0..longitudes).map(|at| 360.0 * at as f64 / longitudes as f64).collect(),
                true,
            ),
        ],
        variables,
        parameters: Vec::new(),
        storage: Storage::default(),
    }
}
