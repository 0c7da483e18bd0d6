//! Data sets of trajectories of a system.

use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use super::initial::{Initial, InitialConfig};
use super::registry::SystemKind;
use super::solver;
use super::spectrum::Domain;
use crate::format::the_well::{WellDim, WellMeta, WellWriter};
use crate::{Error, Result};

/// A data set to solve: keys of `isobar data make`. Keys without a default are the system's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MakeConfig {
    /// The equation and its settings.
    pub system: SystemKind,
    /// Number of trajectories to train on.
    pub samples: usize,
    /// Number of further trajectories for validation. With them or test samples, the data set is a folder with `train`, `valid` and
    /// `test`.
    pub valid_samples: usize,
    /// Number of further trajectories for tests.
    pub test_samples: usize,
    /// Seed of the initial fields. Sample number i of a seed is the same however many samples there are.
    pub seed: u64,
    /// Number of dims.
    pub dims: Option<usize>,
    /// Points along each dim; by default 160 in one dim, 64 in two, 32 in three.
    pub points: Option<usize>,
    /// Length of each side of the periodic box.
    pub length: Option<f64>,
    /// Number of frames of a trajectory, the initial one included.
    pub frames: usize,
    /// Time between frames.
    pub dt: Option<f64>,
    /// Time steps of the solver between frames.
    pub substeps: Option<usize>,
    /// Frames to solve before the first one that is stored.
    pub warm_up: Option<usize>,
    /// Order of the exponential Runge-Kutta method, 1 to 4.
    pub order: usize,
    /// Initial fields.
    pub initial: InitialConfig,
    /// Threads that solve; 0 takes as many as there are cores.
    pub threads: usize,
}

impl Default for MakeConfig {
    /// 64 trajectories of 51 frames.
    fn default() -> Self {
        Self {
            system: SystemKind::default(),
            samples: 64,
            valid_samples: 0,
            test_samples: 0,
            seed: 0,
            dims: None,
            points: None,
            length: None,
            frames: 51,
            dt: None,
            substeps: None,
            warm_up: None,
            order: 4,
            initial: InitialConfig::default(),
            threads: 0,
        }
    }
}

/// Solves trajectories of a system and writes them in The Well's schema, for [`WellFile`](crate::WellFile): one file at `path`, or
/// with validation or test samples the files `path/train/NAME.h5`, `path/valid/NAME.h5` and `path/test/NAME.h5`. Returns the files.
///
/// Solved in float64, stored as float32, frame by frame: memory does not grow with samples or frames. A file takes its name once
/// it is complete, replacing another; an interrupted call leaves nothing, and is made again from the start. `progress` is called
/// with the number of frames written so far, and that of all. Folders that are missing are made. Call on one rank.
///
/// ```
/// use isobar_data::generate::etdrk::{Burgers, MakeConfig, make};
/// use isobar_data::WellFile;
///
/// let folder = tempfile::tempdir()?;
/// let config = MakeConfig {
///     system: Burgers { viscosity: 0.1 }.into(),
///     samples: 2,
///     frames: 3,
///     points: Some(32),
///     ..MakeConfig::default()
/// };
/// let files = make(&config, folder.path().join("burgers.h5"), |_, _| {})?;
/// let file = WellFile::open(&files[0])?;
/// assert_eq!((file.trajectories(), file.frames(), file.fields()[0].name()), (2, 3, "velocity"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Settings out of their ranges, a solution that is not finite, a folder that cannot be made, or a full disk.
pub fn make(
    config: &MakeConfig,
    path: impl AsRef<Path>,
    mut progress: impl FnMut(u64, u64),
) -> Result<Vec<PathBuf>> {
    let plan = Plan::new(config)?;
    let mut parts = plan.parts(config, path.as_ref())?;
    let total = plan.samples as u64 * plan.frames as u64;
    let mut written = 0;
    plan.solve(threads(config), |sample, frame, state| {
        if let Some(part) = parts.iter_mut().find(|part| part.samples.contains(&sample)) {
            plan.write(&mut part.writer, sample - part.samples.start, frame, &state)?;
            written += 1;
            progress(written, total);
        }
        Ok(())
    })?;
    let mut files = Vec::new();
    for Part { path, writer, .. } in parts {
        writer.finish()?;
        files.push(path);
    }
    Ok(files)
}

/// A file of a data set, and the global numbers of its samples.
struct Part {
    path: PathBuf,
    samples: Range<usize>,
    writer: WellWriter,
}

/// Settings of a data set without gaps.
pub(super) struct Plan {
    pub(super) order: usize,
    pub(super) system: SystemKind,
    pub(super) domain: Domain,
    pub(super) initial: Initial,
    pub(super) seed: u64,
    pub(super) samples: usize,
    pub(super) frames: usize,
    pub(super) warm_up: usize,
    pub(super) substeps: usize,
    pub(super) dt: f64,
    /// Samples that are solved together.
    pub(super) together: usize,
}

impl Plan {
    fn new(config: &MakeConfig) -> Result<Self> {
        let system = config.system.clone();
        let defaults = system.defaults();
        let dims = config.dims.unwrap_or(defaults.dims);
        let points = config.points.unwrap_or(match dims {
            1 => 160,
            2 => 64,
            _ => 32,
        });
        let domain = Domain { dims, points, length: config.length.unwrap_or(defaults.length) };
        domain.check()?;
        let dt = config.dt.unwrap_or(defaults.dt);
        let substeps = config.substeps.unwrap_or(defaults.substeps);
        let warm_up = config.warm_up.unwrap_or(defaults.warm_up);
        let counts = [("substeps", substeps, 1), ("frames", config.frames, 1), ("warm_up", warm_up, 0)];
        for (key, value, least) in counts {
            if !(least..=MOST_STEPS).contains(&value) {
                return Err(Error::Invalid(format!(
                    "{key} is {value}, expected {least} to {MOST_STEPS}; --set {key}=10"
                )));
            }
        }
        if !(dt.is_finite() && dt > 0.0) {
            return Err(Error::Invalid(format!(
                "dt is {dt}, expected a finite number above 0; --set dt={}",
                defaults.dt
            )));
        }
        if config.samples == 0 {
            return Err(Error::Invalid("samples is 0, expected at least 1; --set samples=64".to_owned()));
        }
        let state = system.channels(dims).max(1).saturating_mul(points.pow(dims as u32));
        let samples = [config.samples, config.valid_samples, config.test_samples]
            .into_iter()
            .fold(0, usize::saturating_add);
        let size = [config.frames, state, size_of::<f32>()].into_iter().fold(samples, usize::saturating_mul);
        if size > MOST_BYTES || samples.saturating_mul(config.frames) > MOST_FRAMES {
            return Err(Error::Invalid(format!(
                "{samples} samples of {} frames of {state} values are {size} bytes, expected at most {MOST_BYTES} bytes and \
                 {MOST_FRAMES} frames in all; set fewer samples, frames or points",
                config.frames
            )));
        }
        let initial = config.initial.over(system.initial(), &domain)?;
        solver::check(&system, domain, dt / substeps as f64, config.order)?;
        // A number that does not depend on that of the samples: results may depend on it in the last bit.
        let together = (TOGETHER / state).clamp(1, 32);
        let (seed, frames) = (config.seed, config.frames);
        Ok(Self {
            order: config.order,
            system,
            domain,
            initial,
            seed,
            samples,
            frames,
            warm_up,
            substeps,
            dt,
            together,
        })
    }

    /// Makes the files.
    fn parts(&self, config: &MakeConfig, path: &Path) -> Result<Vec<Part>> {
        let name = self.system.name();
        let counts =
            [("train", config.samples), ("valid", config.valid_samples), ("test", config.test_samples)];
        let is_folder = config.samples < self.samples;
        let mut parts = Vec::new();
        let mut first = 0;
        for (part, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            let path = if is_folder { path.join(part).join(format!("{name}.h5")) } else { path.to_owned() };
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)
                    .map_err(|error| Error::io(folder, "make the folder", error))?;
            }
            let writer = WellWriter::create(&path, &self.meta(count))?;
            let settings = serde_json::to_string(config).unwrap_or_default();
            writer.attribute("isobar_make", &settings)?;
            parts.push(Part { path, samples: first..first + count, writer });
            first += count;
        }
        Ok(parts)
    }

    fn meta(&self, trajectories: usize) -> WellMeta {
        let dim = |name: &&str| WellDim {
            name: (*name).to_owned(),
            coordinates: self.domain.coordinates(),
            periodic: true,
        };
        WellMeta {
            name: format!("{}_{}", self.system.name(), self.domain.points),
            trajectories,
            times: (0..self.frames).map(|frame| frame as f64 * self.dt).collect(),
            dims: ["x", "y", "z"][..self.domain.dims].iter().map(dim).collect(),
            fields: self
                .system
                .fields()
                .into_iter()
                .map(|(field, order)| (field.to_owned(), order))
                .collect(),
            parameters: parameters(&self.system),
            ..WellMeta::default()
        }
    }

    /// Writes a frame `[channel, x, …]`, a field after the other.
    fn write(&self, writer: &mut WellWriter, trajectory: usize, frame: usize, state: &Tensor) -> Result<()> {
        let mut first = 0;
        for (field, order) in self.system.fields() {
            let channels = self.domain.dims.pow(order as u32) as i64;
            let values = state.f_narrow(0, first, channels)?.f_unsqueeze(0)?;
            writer.write(field, trajectory, frame, &values)?;
            first += channels;
        }
        Ok(())
    }
}

/// Values of the states that are solved together, about: small ones share the costs of a call of libtorch.
const TOGETHER: usize = 1 << 13;
/// Largest number of frames, of time steps between them, and of frames before the first.
const MOST_STEPS: usize = 1 << 24;
/// Largest number of frames of all samples.
const MOST_FRAMES: usize = 1 << 32;
/// Largest size of a data set: 64 TiB.
const MOST_BYTES: usize = 1 << 46;

fn threads(config: &MakeConfig) -> usize {
    match config.threads {
        0 => std::thread::available_parallelism().map_or(1, NonZero::get),
        threads => threads.min(1024),
    }
}

/// The numbers among the settings of a system.
fn parameters(system: &SystemKind) -> Vec<(String, f64)> {
    let mut parameters = Vec::new();
    let Ok(Value::Object(table)) = serde_json::to_value(system) else { return parameters };
    for (key, value) in table {
        match value {
            Value::Bool(value) => parameters.push((key, f64::from(u8::from(value)))),
            Value::Number(number) => parameters.extend(number.as_f64().map(|number| (key, number))),
            Value::Array(values) => {
                let numbers = values.iter().filter_map(Value::as_f64).enumerate();
                parameters.extend(numbers.map(|(at, number)| (format!("{key}_{at}"), number)));
            }
            _ => (),
        }
    }
    parameters
}
