//! `isobar predict`: what a trained network makes of the fields of a data set.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use isobar_collectives::Group;
use isobar_data::{DarcyFields, DarcyFile, DarcyWriter, WellFile, WellWriter};
use isobar_manager::config::Resolved;
use isobar_manager::{DistributedManager, logging};
use isobar_shard::Parallel;
use isobar_torch::memory::to_vec;
use isobar_train::checkpoint::{Checkpoints, Contents, Keep, Loaded, Which};
use isobar_train::config::Predict;
use isobar_train::loss::relative_l2_errors;
use isobar_train::{BoxError, Error, FieldLayout, FieldModel, Parameters, Step};
use tch::{Device, Kind, Tensor};

use crate::config::{Config, ConfigArgs};
use crate::exit::Exit;
use crate::run::picture::Shown;
use crate::run::{self, Job, Meaning, RANKS_OWN, Run, Source};
use crate::{start, terminal};

/// What `isobar predict` takes.
#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// `best`, `latest`, or a checkpoint's folder; by default the best there is, else the latest. Of these that are torn are
    /// passed over
    #[arg(long, value_name = "WHICH")]
    checkpoint: Option<String>,
    /// Numbers of samples or trajectories of the data file, as `0,3,5`; by default those kept for validation
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    samples: Option<Vec<usize>>,
    /// Of trajectories: the frame to start from
    #[arg(long, default_value_t = 0, value_name = "FRAME")]
    start: usize,
    /// Of trajectories: how many steps to go; by default to the file's last frame. There may be more
    #[arg(long, value_name = "STEPS")]
    steps: Option<usize>,
    /// The HDF5 file to write, in the layout of the data; by default prediction.h5 in the folder of the run. A picture of the
    /// same name is drawn beside it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn command(args: &PredictArgs) -> Result<Exit> {
    let resolved = args.config.load(&[])?;
    let config = &resolved.value;
    let manager = start::for_run(&config.distributed, &config.run.folder())?;
    logging::init(&config.distributed.log, manager.rank(), None)?;
    predict(&manager, &resolved, args)?;
    DistributedManager::cleanup(true)?;
    Ok(Exit::Good)
}

fn predict(manager: &DistributedManager, resolved: &Resolved<Config>, args: &PredictArgs) -> Result<()> {
    resolved.agree(&manager.group(None)?, &RANKS_OWN)?;
    let config = &resolved.value;
    let said = run::with(manager, config, Prediction { config, args })?;
    if manager.rank() == 0 {
        said.iter().for_each(|line| terminal::line(line));
    }
    Ok(())
}

/// Prediction, which gives what there is to say of it.
struct Prediction<'a> {
    config: &'a Config,
    args: &'a PredictArgs,
}

/// What is predicted, and how far it is from the truth.
#[derive(Default)]
struct Outcome {
    /// Of the first sample, what a picture shows.
    first: Option<Shown>,
    /// For each step the errors of the samples whose truth is known.
    errors: Vec<Vec<f64>>,
}

impl Job for Prediction<'_> {
    type Out = Vec<String>;
    const TRAINS: bool = false;

    fn run<L, F>(self, run: Run<L, F>) -> Result<Self::Out>
    where
        L: FieldLayout,
        F: Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>,
    {
        let Self { config, args } = self;
        let Run { source, layout, window, positions, forward, params, buffers, ranks, device } = run;
        let Meaning { input, target, .. } = self.load(&params, &buffers, &ranks.world)?;
        let residual = config.data.predict == Predict::Change;
        let model = FieldModel { forward, layout, positions, residual, input, target };

        let samples = match &args.samples {
            Some(samples) => samples.clone(),
            None => {
                let there = source.samples();
                (there.saturating_sub(config.data.validation_samples)..there).collect()
            }
        };
        if let Some(missing) = samples.iter().find(|&&sample| sample >= source.samples()) {
            let there = source.samples();
            bail!(
                Exit::Usage.because(format!("sample {missing} is asked for; {} has {there}", source.path()))
            );
        }
        if samples.is_empty() {
            bail!(Exit::Usage.because("there is no sample to predict: name some with --samples"));
        }
        let out = args.out.clone().unwrap_or_else(|| config.run.folder().join("prediction.h5"));
        let writes = ranks.world.rank() == 0;
        let options = (config.train.precision.kind(), device);
        let outcome = match &source {
            Source::Darcy(file) => {
                if args.start != 0 || args.steps.is_some_and(|steps| steps != 1) {
                    bail!(Exit::Usage.because("Darcy flow has no steps: leave --start and --steps away"));
                }
                darcy(&model, file, &samples, (&window, options), writes.then_some(&out))?
            }
            Source::Well { file, fields } => {
                let (start, last) = (args.start, file.frames() - 1);
                let steps = args.steps.unwrap_or(last.saturating_sub(start));
                if start > last || steps == 0 {
                    bail!(Exit::Usage.because(format!(
                        "{steps} steps from frame {start} are asked for; {} has the frames 0 to {last}: start earlier, or \
                         say --steps",
                        source.path()
                    )));
                }
                let names: Vec<&str> = fields.iter().map(String::as_str).collect();
                let rollout = Rollout { file, names: &names, samples: &samples, start, steps };
                let name = format!("{} by {}", file.name(), config.run.name);
                rollout.predict(&model, (&window, options), writes.then_some((&out, name)))?
            }
        };
        let mut said = outcome.said();
        if writes {
            said.push(format!("prediction  {}", out.display()));
            let picture = out.with_extension("png");
            if let Some(shown) = &outcome.first {
                shown.draw(matches!(source, Source::Well { .. }), &picture)?;
                said.push(format!("picture     {}", picture.display()));
            }
        }
        Ok(said)
    }
}

impl Prediction<'_> {
    /// Puts the checkpoint into the network. All ranks call.
    fn load(&self, params: &Parameters, buffers: &[(String, Tensor)], world: &Group) -> Result<Meaning> {
        let checkpoints = Checkpoints::new(&self.config.run.folder().join("checkpoints"), Keep::ALL, world);
        let mut contents = Contents { params, buffers, optimizer: None };
        let mut load = |which: &Which| checkpoints.load(which, &mut contents);
        let Loaded { path, state } = match self.args.checkpoint.as_deref() {
            Some("best") => load(&Which::Best)?,
            Some("latest") => load(&Which::Newest)?,
            Some(path) => load(&Which::At(PathBuf::from(path)))?,
            None => match load(&Which::Best) {
                Err(Error::NoCheckpoint { .. }) => load(&Which::Newest)?,
                loaded => loaded?,
            },
        };
        let meaning: Meaning = serde_json::from_value(state.extra).map_err(|error| {
            Exit::Data.because(format!(
                "{} does not say what its network's numbers mean ({error}); train it with `isobar train`",
                path.display()
            ))
        })?;
        self.means_the_same(&path, &meaning)?;
        Ok(meaning)
    }

    /// Refuses a network that was trained on other fields, or to give something else.
    fn means_the_same(&self, folder: &Path, trained: &Meaning) -> Result<()> {
        let data = &self.config.data;
        let pairs = [
            ("fields", format!("{:?}", trained.fields), format!("{:?}", data.fields)),
            ("predict", format!("{:?}", trained.predict), format!("{:?}", data.predict)),
            ("positions", trained.positions.to_string(), data.positions.to_string()),
        ];
        match pairs.iter().find(|(_, trained, now)| trained != now) {
            None => Ok(()),
            Some((key, trained, now)) => bail!(Exit::Usage.because(format!(
                "{} was trained with data.{key} = {trained}, and is to predict with {now}; set data.{key} as it was",
                folder.display()
            ))),
        }
    }
}

impl Outcome {
    /// The errors in words.
    fn said(&self) -> Vec<String> {
        let known: Vec<f64> = self
            .errors
            .iter()
            .filter(|errors| !errors.is_empty())
            .map(|errors| errors.iter().sum::<f64>() / errors.len() as f64)
            .collect();
        let percent = |error: &f64| format!("{:.2} %", error * 100.0);
        match &known[..] {
            [] => Vec::new(),
            [only] => vec![format!("relative L2 error {}", percent(only))],
            [first, .., last] => vec![format!(
                "relative L2 error {} after one step, {} after {}",
                percent(first),
                percent(last),
                known.len()
            )],
        }
    }
}

/// Steps from a frame of some trajectories on.
struct Rollout<'a> {
    file: &'a WellFile,
    names: &'a [&'a str],
    samples: &'a [usize],
    start: usize,
    steps: usize,
}

impl Rollout<'_> {
    /// Predicts and writes trajectory by trajectory.
    fn predict<L, F>(
        &self,
        model: &FieldModel<L, F>,
        (window, (kind, device)): (&[Range<usize>], (Kind, Device)),
        out: Option<(&PathBuf, String)>,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>,
    {
        let known = self.steps.min(self.file.frames() - 1 - self.start);
        let mut writer = out.map(|(path, name)| self.writer(path, name)).transpose()?;
        let mut outcome = Outcome { first: None, errors: vec![Vec::new(); self.steps] };
        for (index, &trajectory) in self.samples.iter().enumerate() {
            // All ranks read their windows of what there is to start from and to compare with.
            let frames =
                self.file.read(self.names, trajectory, self.start..self.start + known + 1, window)?;
            let frames = frames.f_to_device(device)?.f_to_kind(kind)?;
            let own = model.layout.own(&[0])?.len() as i64;
            let frame =
                |at: usize| -> Result<Tensor> { Ok(frames.f_narrow(0, at as i64, 1)?.f_narrow(0, 0, own)?) };
            let predicted = boxed(model.roll_out(&frame(0)?, 1, self.steps))?;
            let array = |at: usize| -> Result<L::Array> { Ok(model.layout.array(&frame(at)?, 1)?) };
            let input = array(0)?;
            let truth: Vec<L::Array> = (1..=known).map(array).collect::<Result<_>>()?;
            for ((prediction, target), errors) in predicted.iter().zip(&truth).zip(&mut outcome.errors) {
                errors.extend(relative_l2_errors(prediction, target)?);
            }
            if index == 0 {
                outcome.first = Some(Shown::of(&input, &truth, &predicted)?);
            }
            // A frame at a time is whole.
            for (at, fields) in std::iter::once(&input).chain(&predicted).enumerate() {
                let whole = fields.whole()?;
                if let Some(writer) = &mut writer {
                    self.write(writer, (index, at), &whole)?;
                }
            }
        }
        if let Some(writer) = writer {
            writer.finish()?;
        }
        Ok(outcome)
    }

    /// A file like the one that was read, of the frames from the first one on.
    fn writer(&self, path: &Path, name: String) -> Result<WellWriter> {
        let mut meta = self.file.meta();
        let times = self.file.times();
        let interval = match times {
            [.., before, last] => last - before,
            _ => 1.0,
        };
        let time = |frame: usize| {
            let beyond = frame.saturating_sub(times.len() - 1) as f64;
            times[frame.min(times.len() - 1)] + beyond * interval
        };
        meta.name = name;
        meta.trajectories = self.samples.len();
        meta.times = (self.start..=self.start + self.steps).map(time).collect();
        meta.fields.retain(|(field, _)| self.names.contains(&field.as_str()));
        make_folder(path)?;
        Ok(WellWriter::create(path, &meta)?)
    }

    /// Writes a frame `[1, channel, spatial…]` of a trajectory, a field after the other.
    fn write(&self, writer: &mut WellWriter, (trajectory, at): (usize, usize), frame: &Tensor) -> Result<()> {
        let mut first = 0;
        for name in self.names {
            let components = self.file.field(name)?.components() as i64;
            writer.write(name, trajectory, at, &frame.f_narrow(1, first, components)?)?;
            first += components;
        }
        Ok(())
    }
}

/// Predicts the solutions of samples of Darcy flow, and writes them with their coefficients.
fn darcy<L, F>(
    model: &FieldModel<L, F>,
    file: &DarcyFile,
    samples: &[usize],
    (window, (kind, device)): (&[Range<usize>], (Kind, Device)),
    out: Option<&PathBuf>,
) -> Result<Outcome>
where
    L: FieldLayout,
    F: Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>,
{
    let mut writer = None;
    if let Some(path) = out {
        if file.rows() != file.cols() {
            bail!(Exit::Data.because(format!("{} is not of square fields", file.path().display())));
        }
        make_folder(path)?;
        writer = Some(DarcyWriter::create(path, samples.len(), file.rows(), file.beta())?);
    }
    let mut outcome = Outcome { first: None, errors: vec![Vec::new()] };
    for (index, &sample) in samples.iter().enumerate() {
        let own = &[sample][..model.layout.own(&[0])?.len()];
        let DarcyFields { nu, u } = file.read(own, window[0].clone(), window[1].clone())?;
        let there = |field: Tensor| field.f_to_device(device)?.f_to_kind(kind);
        let (nu, u) = (there(nu)?, there(u)?);
        let predicted = boxed(model.roll_out(&nu, 1, 1))?;
        let (coefficient, target) = (model.layout.array(&nu, 1)?, model.layout.array(&u, 1)?);
        outcome.errors[0].extend(relative_l2_errors(&predicted[0], &target)?);
        if index == 0 {
            outcome.first = Some(Shown::of(&coefficient, &[target], &predicted)?);
        }
        let (coefficient, solution) = (coefficient.whole()?, predicted[0].whole()?);
        if let Some(writer) = &mut writer {
            writer.append(&numbers(&coefficient)?, &numbers(&solution)?)?;
        }
    }
    if let Some(writer) = writer {
        writer.finish()?;
    }
    Ok(outcome)
}

fn numbers(field: &Tensor) -> Result<Vec<f32>> {
    Ok(to_vec(&field.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?)?)
}

fn boxed<T>(result: Result<T, BoxError>) -> Result<T> {
    result.map_err(anyhow::Error::from_boxed)
}

fn make_folder(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    let made = std::fs::create_dir_all(folder);
    made.map_err(|error| {
        Exit::Data.because(format!("cannot make the folder {}: {error}", folder.display())).into()
    })
}
