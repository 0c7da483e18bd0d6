//! Prediction of rounds of samples, one for each of the ranks that share them, step by step.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::Result;
use isobar_array::{Array, Shape};
use isobar_collectives::Group;
use isobar_data::{Batch, Dataset, Window};
use isobar_models::BatchPart;
use isobar_train::metric::{Scoreboard, Spectra};
use isobar_train::{BoxError, FieldLayout, FieldModel, Forward, Roles, Sample, Start};
use tch::{Device, Kind, Tensor};

use super::divergence::{self, Divergence, NotFinite};
use super::fields::{Out, Prediction};
use super::outcome::Outcome;
use super::output::{Checked, Output};
use super::sharing::Sharing;
use super::truth::Truth;
use super::windows::Windows;
use crate::run::picture::Shown;
use crate::run::{Scoring, all_ok, as_str, scoring};
use isobar_command::exit::{Because, Exit};

/// The parts of inputs and targets that this rank reads, all ranks, and the dtype and device of the parameters.
pub(super) struct Place<'a> {
    pub(super) window: &'a [Range<usize>],
    pub(super) target_window: &'a [Range<usize>],
    pub(super) world: &'a Group,
    pub(super) options: (Kind, Device),
}

impl Place<'_> {
    /// Stored values in the dtype and on the device of the parameters.
    fn to_options(&self, stored: &Tensor) -> Result<Tensor> {
        let (kind, device) = self.options;
        Ok(stored.f_to_device(device)?.f_to_kind(kind)?)
    }
}

/// Progress log of rank 0: number of predicted samples, at most once every ten seconds.
struct Progress {
    all: usize,
    shows: bool,
    last: Instant,
}

impl Progress {
    const PAUSE: Duration = Duration::from_secs(10);

    fn new(all: usize, world: &Group) -> Self {
        Self { all, shows: world.rank() == 0, last: Instant::now() }
    }

    fn predicted(&mut self, count: usize) {
        if self.shows && self.last.elapsed() >= Self::PAUSE {
            tracing::info!("predicted {count} of {} samples", self.all);
            self.last = Instant::now();
        }
    }
}

/// Layout of the predictions of a round.
type Fields<L, S> = <S as Sharing<L>>::Fields;

/// Predictions of a round.
type Predicted<L, S> = <Fields<L, S> as FieldLayout>::Array;

impl Prediction<'_> {
    /// Predicts the samples in rounds, in which each of the ranks that share samples has one, and scores and writes each step before
    /// the next is computed: memory does not grow with the number of steps, except by the stored forcings. Values that are not finite
    /// are written as NaN; if the schema of the data does not allow NaN, the prediction starts again in plain HDF5. All
    /// ranks call.
    pub(super) fn run<L, F, S>(
        &self,
        network: (&FieldModel<L, F>, &S),
        place: &Place<'_>,
        out: Out<'_>,
        scoring: &Scoring,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
        S: Sharing<L>,
    {
        match self.run_into(network, place, out, scoring) {
            Err(error) if error.is::<RefusesNan>() && out.is_hdf5() && !out.plain => {
                if place.world.rank() == 0 {
                    tracing::warn!(
                        "the schema of {} does not allow NaN; predicting again, into plain HDF5",
                        self.source.targets().path().display()
                    );
                }
                self.run_into(network, place, Out { plain: true, ..out }, scoring)
            }
            Err(error) if error.is::<RefusesNan>() => {
                let path = out.path.display();
                Err(Exit::Data.because(format!("{error}; {path} cannot hold NaN: use --out FILE.h5")).into())
            }
            ended => ended,
        }
    }

    /// Runs the prediction into one file. All ranks call, and all get [`RefusesNan`] if the file cannot hold NaN.
    fn run_into<L, F, S>(
        &self,
        (model, sharing): (&FieldModel<L, F>, &S),
        place: &Place<'_>,
        out: Out<'_>,
        scoring: &Scoring,
    ) -> Result<Outcome>
    where
        L: FieldLayout,
        F: Forward<L::Array>,
        S: Sharing<L>,
    {
        let layout = sharing.fields().targets();
        let most = layout.sharing_ranks().min(self.samples.len());
        let windows = Windows::new(layout, place.target_window, most, place.world)?;
        let output = self.output(out, &windows, place.world)?;
        // Such a writer may need one sample after the other.
        let at_once = if self.source.has_steps() && output.takes_frames() { 1 } else { most };
        let outcome = self.empty_outcome(scoring);
        let (times, found) = (self.times(), Vec::new());
        let mut rounds = Rounds {
            prediction: self,
            model,
            sharing,
            place,
            scoring,
            times,
            windows,
            output,
            outcome,
            found,
        };
        let mut progress = Progress::new(self.samples.len(), place.world);
        for (index, samples) in self.samples.chunks(at_once).enumerate() {
            let round = Round { first: index * at_once, samples };
            match self.source.has_steps() {
                true => rounds.forecast(&round)?,
                false => rounds.map(&round)?,
            }
            progress.predicted(round.first + samples.len());
        }
        rounds.output.finish(place.world)?;
        Ok(rounds.outcome)
    }

    /// An outcome without samples.
    fn empty_outcome(&self, scoring: &Scoring) -> Outcome {
        let none = || vec![Vec::new(); self.steps];
        let (errors, persistence, known) = match self.source.has_steps() {
            true => (none(), none(), self.known()),
            false => (vec![Vec::new()], Vec::new(), 1),
        };
        let metrics = scoring.report.metrics();
        let board = Scoreboard::new(metrics, known);
        let spectra = Spectra::are_reported(metrics).then(Spectra::default);
        Outcome { first: None, errors, persistence, board, spectra, divergence: Divergence::default() }
    }
}

/// Samples that are predicted at once.
struct Round<'a> {
    /// Place of the first one among all samples.
    first: usize,
    /// Their numbers.
    samples: &'a [usize],
}

/// Truth and baseline of a prediction after one step.
struct Known<'a, A> {
    target: &'a A,
    /// This rank's part of the target.
    local: &'a Tensor,
    /// Prediction of no change, of trajectories.
    persistent: Option<&'a A>,
}

/// Error of a prediction that is not finite, for a file that cannot hold NaN.
#[derive(Debug)]
struct RefusesNan(String);

impl fmt::Display for RefusesNan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RefusesNan {}

/// A prediction in rounds, with its results so far.
struct Rounds<'a, L, F, S> {
    prediction: &'a Prediction<'a>,
    model: &'a FieldModel<L, F>,
    sharing: &'a S,
    place: &'a Place<'a>,
    scoring: &'a Scoring,
    /// Times of the start frame and of each step.
    times: Vec<f64>,
    windows: Windows<'a>,
    output: Output,
    outcome: Outcome,
    /// Values of this rank that are not finite, in the step that is written next.
    found: Vec<NotFinite>,
}

impl<L, F, S> Rounds<'_, L, F, S>
where
    L: FieldLayout,
    F: Forward<L::Array>,
    S: Sharing<L>,
{
    /// Rolls out, scores and writes trajectories step by step. All ranks call.
    fn forecast(&mut self, round: &Round<'_>) -> Result<()> {
        let (prediction, sharing, count) = (self.prediction, self.sharing, round.samples.len());
        let (layout, targets) = (sharing.fields(), &prediction.source.targets);
        let own = layout.own(round.samples)?;
        let (start, last) = self.read(|| self.start(round))?;
        let last = last.f_narrow(0, 0, own.len() as i64)?;
        let input = layout.array(&last, count)?;
        let persistent = layout.array(&boxed(self.model.filled(&last))?, count)?;
        let first = prediction.start + 1;
        let frames = (first..first + prediction.known(), self.place.target_window);
        let mut truth = Truth::new(&**prediction.source.targets(), own, targets, frames)?;
        self.begin(round, &input)?;
        let present = boxed(self.present(&input))?;
        self.put(round, 0, &[(targets, &present_else(f64::NAN, &input, present.as_ref())?)])?;
        roll_out(self.model, start, count, |at, members| {
            let members = sharing.join(&members, count)?;
            let local = self
                .read(|| truth.frame(first + at)?.map(|frame| self.place.to_options(&frame)).transpose())?;
            let target = local.as_ref().map(|local| layout.array(local, count)).transpose()?;
            let known = target.as_ref().zip(local.as_ref());
            let known = known.map(|(target, local)| Known { target, local, persistent: Some(&persistent) });
            let predicted = self.score(round, at, &members, known)?;
            self.find_divergence(round, at, &present_else(0.0, &predicted, present.as_ref())?)?;
            self.put(round, at + 1, &[(targets, &present_else(f64::NAN, &predicted, present.as_ref())?)])
        })
    }

    /// Predicts, scores and writes the outputs of samples without time. All ranks call.
    fn map(&mut self, round: &Round<'_>) -> Result<()> {
        let (prediction, sharing, count) = (self.prediction, self.sharing, round.samples.len());
        let (source, place) = (prediction.source, self.place);
        let layout = sharing.fields().targets();
        let own = layout.own(round.samples)?;
        let read = |data: &dyn Dataset, window: &[Range<usize>], names: &[String], samples: &[usize]| {
            let fields = data.read(&Window::still(window), samples, &as_str(names))?;
            place.to_options(&fields.f_select(1, 0)?)
        };
        let passed = sharing.network_samples(round.samples)?;
        let (from, local) = self.read(|| {
            let from = read(&*source.data, place.window, &source.inputs, passed)?;
            Ok((from, read(&**source.targets(), place.target_window, &source.targets, own)?))
        })?;
        let input = sharing.fields().array(&from.f_narrow(0, 0, own.len() as i64)?, count)?;
        let target = layout.array(&local, count)?;
        self.begin(round, &input)?;
        let start = Start { part: self.part(round), ..Start::of_frame(&from, 1, &[]) };
        roll_out(self.model, start, count, |_, members| {
            let known = Known { target: &target, local: &local, persistent: None };
            let predicted = self.score(round, 0, &sharing.join(&members, count)?, Some(known))?;
            self.find_divergence(round, 0, &predicted)?;
            let inputs = prediction.written_inputs();
            let written = [(inputs, &input), (&source.targets, &predicted)];
            self.put(round, 0, &written[usize::from(inputs.is_empty())..])
        })
    }

    /// Calls `read` and fails on all ranks if it failed on one, so that none waits for it in what follows. All ranks call.
    fn read<T>(&self, read: impl FnOnce() -> Result<T>) -> Result<T> {
        Ok(all_ok(self.place.world, read().map(|values| (Vec::new(), values)))?.0)
    }

    /// Reads the frames and forcings from which this rank's network starts, and returns them with the newest frame with the channels of
    /// outputs. Does not communicate.
    fn start(&self, round: &Round<'_>) -> Result<(Start, Tensor)> {
        let (prediction, roles) = (self.prediction, self.model.roles.as_ref());
        let (source, first) = (prediction.source, prediction.start);
        let samples = self.sharing.network_samples(round.samples)?;
        let read = |frames: Range<usize>, names: &[String]| -> Result<Vec<Tensor>> {
            let window = Window { frames, points: self.place.window.to_vec() };
            let fields = source.data.read(&window, samples, &as_str(names))?;
            Ok(self.place.to_options(&fields)?.f_unbind(1)?)
        };
        let past = roles.map_or(0, |roles| roles.history - 1);
        let mut frames = read(first - past..first + 1, &source.names.stored())?;
        let batch = Batch { input: frames.remove(0), targets: frames, times: Vec::new() };
        let Sample { start, last, .. } = boxed(Roles::arrange_forecast(roles, batch))?;
        let (steps, part) = (prediction.steps, self.part(round));
        let mut forcings = start.forcings;
        if !source.names.forcings.is_empty() && steps > 1 {
            forcings.extend(read(first + 1..first + steps, &source.names.forcings)?);
        }
        let times = self.times.iter().map(|time| vec![*time; samples.len()]).collect();
        Ok((Start { forcings, times, steps, part, ..start }, last))
    }

    /// Returns the place of the network's batch among all samples, so that a denoiser draws other noise for each.
    fn part(&self, round: &Round<'_>) -> Option<BatchPart> {
        let offset = (round.first + self.sharing.offset(round.samples.len())) as i64;
        Some(BatchPart { offset, total: self.prediction.samples.len() as i64 })
    }

    /// Begins the picture, of the first sample. All ranks call.
    fn begin(&mut self, round: &Round<'_>, input: &Predicted<L, S>) -> Result<()> {
        if round.first == 0 {
            let points = self.prediction.legend.points.clone();
            self.outcome.first =
                Some(Shown::begin(&input.narrow(0, 0, 1)?, self.prediction.steps.max(1), points)?);
        }
        Ok(())
    }

    /// Adds the prediction after the step `at`, from 0 on, to errors, metrics and the picture, and returns it: of an ensemble the mean.
    /// All ranks call.
    fn score(
        &mut self,
        round: &Round<'_>,
        at: usize,
        members: &Predicted<L, S>,
        known: Option<Known<'_, Predicted<L, S>>>,
    ) -> Result<Predicted<L, S>> {
        let layout = self.sharing.fields().targets();
        let predicted = scoring::single(members, self.place.target_window.len() + 2)?;
        let Outcome { first, errors, persistence, board, spectra, .. } = &mut self.outcome;
        if let Some(Known { target, local, persistent }) = &known {
            errors[at].extend(self.scoring.errors(layout, &predicted, target)?);
            if let Some(persistent) = persistent {
                persistence[at].extend(self.scoring.errors(layout, persistent, target)?);
            }
            let forecast = self.scoring.forecast(layout, round.samples.len(), members, (target, local))?;
            if let Some(forecast) = &forecast {
                board.add(at + 1, forecast)?;
                spectra.iter_mut().try_for_each(|spectra| spectra.add(at + 1, forecast))?;
            }
        }
        if let Some(shown) = first.as_mut().filter(|_| round.first == 0) {
            let target = known.map(|known| known.target.narrow(0, 0, 1)).transpose()?;
            let truth = target.as_ref().map(|target| (target, &errors[at][..]));
            shown.add(at + 1, &predicted.narrow(0, 0, 1)?, truth)?;
        }
        Ok(predicted)
    }

    /// Finds the samples and channels of this rank that are not finite after the step `at`, from 0 on.
    fn find_divergence(&mut self, round: &Round<'_>, at: usize, predicted: &Predicted<L, S>) -> Result<()> {
        let layout = self.sharing.fields().targets();
        let own = layout.own(round.samples)?;
        let found = divergence::not_finite(&boxed(layout.local(predicted))?)?.into_iter();
        self.found =
            found.map(|[sample, channel]| NotFinite { sample: own[sample], step: at + 1, channel }).collect();
        Ok(())
    }

    /// Writes frames of the time `at`, each with the names of its variables, sample by sample, with NaN where they are not finite. All
    /// ranks call.
    fn put(&mut self, round: &Round<'_>, at: usize, frames: &[(&[String], &Predicted<L, S>)]) -> Result<()> {
        let layout = self.sharing.fields().targets();
        let frames = frames.iter().map(|(names, fields)| {
            let local = boxed(layout.local(fields))?;
            Ok((*names, if self.found.is_empty() { local } else { divergence::with_nan(&local)? }))
        });
        let frames = frames.collect::<Result<Vec<_>>>()?;
        for sample in 0..round.samples.len() {
            for (names, local) in &frames {
                self.output.put(&self.windows, (sample, local), |writer, points, values| {
                    self.prediction.write(writer, (round.first + sample, at), names, (points, values))
                })?;
            }
        }
        let own = std::mem::take(&mut self.found);
        let Checked { refuses_nan, found } = self.output.check(self.place.world, &own)?;
        let is_first = self.outcome.divergence.add(&found);
        if !is_first && !refuses_nan {
            return Ok(());
        }
        let diverged = self.prediction.diverged(&self.outcome.divergence, &self.model.variables);
        let text = diverged.unwrap_or_default();
        if refuses_nan {
            let text = if text.is_empty() { "fields with missing values".to_owned() } else { text };
            return Err(RefusesNan(text).into());
        }
        if self.place.world.rank() == 0 {
            tracing::warn!("{text}");
        }
        Ok(())
    }

    /// Returns where the fields that a forecast starts from have values, if missing values are masked. Diagnostic variables are not
    /// predicted from themselves: they have values everywhere.
    fn present(&self, from: &Predicted<L, S>) -> Result<Option<Predicted<L, S>>, BoxError> {
        if self.model.missing.is_none() {
            return Ok(None);
        }
        let prognostic = self.model.roles.as_ref().map(|roles| roles.prognostic as i64);
        let present = self.sharing.fields().map(from, |local| {
            let present = local.f_isnan()?.f_logical_not()?;
            let channels = present.size()[1];
            Ok(match prognostic.filter(|prognostic| *prognostic < channels) {
                None => present,
                Some(prognostic) => {
                    let others = present.f_narrow(1, prognostic, channels - prognostic)?.f_ones_like()?;
                    Tensor::f_cat(&[present.f_narrow(1, 0, prognostic)?, others], 1)?
                }
            })
        })?;
        Ok(Some(present))
    }
}

/// Returns the fields with `value` where `present` is false.
fn present_else<A: Array>(value: f64, fields: &A, present: Option<&A>) -> Result<A> {
    let Some(present) = present else { return Ok(fields.shallow_clone()) };
    let value = fields.constant(&Tensor::from(value).f_to_kind(fields.kind())?)?;
    Ok(present.select_where(fields, &value)?)
}

/// Rolls out the network, hands each step to `each` before the next is computed, and returns its error as it is. All ranks of the
/// layout call.
fn roll_out<L, F>(
    model: &FieldModel<L, F>,
    start: Start,
    count: usize,
    mut each: impl FnMut(usize, L::Array) -> Result<()>,
) -> Result<()>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    let mut failed = None;
    let rolled = model.roll_out_each(start, count, |at, members| {
        each(at, members).map_err(|error| {
            let text = format!("{error:#}");
            failed = Some(error);
            text.into()
        })
    });
    match failed {
        Some(error) => Err(error),
        None => boxed(rolled),
    }
}

fn boxed<T>(result: Result<T, BoxError>) -> Result<T> {
    result.map_err(anyhow::Error::from_boxed)
}
