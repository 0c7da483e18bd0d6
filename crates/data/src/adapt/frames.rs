//! A range of the frames of a data set.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use tch::Tensor;

use crate::calendar::{TimeAxis, TimePoint, TimeUnit};
use crate::dataset::{Dataset, Window, check_window};
use crate::dataset_writer::DatasetWriter;
use crate::grid::PredictionMeta;
use crate::{Error, Result};

/// A data set of trajectories, of which only frames between two times are there.
#[derive(Debug)]
pub struct Frames {
    data: Arc<dyn Dataset>,
    frames: Range<usize>,
    times: Vec<f64>,
    unit: Option<TimeUnit>,
}

impl Frames {
    /// Keeps the frames from one time to another, both included. A date includes all of its day, a year all of its days.
    /// `key` names the setting in errors.
    ///
    /// # Errors
    /// Data without times, dates where the times have no calendar, times in the wrong order, and a range without frames.
    pub fn between(data: Arc<dyn Dataset>, key: &str, range: &[TimePoint; 2]) -> Result<Self> {
        let path = data.path().display().to_string();
        let Some(times) = data.times() else {
            return Err(Error::Config(format!("{key} selects times, but samples of {path} have none")));
        };
        let [first, last] = range;
        let start = boundary(&*data, key, first)?;
        let end = boundary(&*data, key, last)?;
        let from = times.partition_point(|time| start.is_after(*time));
        let to = times.partition_point(|time| !end.ends_before(*time));
        if from >= to {
            return Err(Error::Config(format!(
                "{key} = [{first}, {last}] selects no frame of {path}, whose times are {} to {}",
                text(&*data, times.first()),
                text(&*data, times.last())
            )));
        }
        let (times, unit) = (times[from..to].to_vec(), data.time_unit().cloned());
        Ok(Self { data, frames: from..to, times, unit })
    }

    /// Keeps all frames, with their times in the unit of another data set.
    ///
    /// # Errors
    /// Units of which one is no unit since a date, or different calendars.
    pub fn in_unit(data: Arc<dyn Dataset>, unit: &TimeUnit) -> Result<Self> {
        let times = times_in(&*data, unit)?;
        Ok(Self { frames: 0..times.len(), times, unit: Some(unit.clone()), data })
    }

    /// Keeps frames by their numbers.
    ///
    /// # Errors
    /// Data without times, and frames that do not exist.
    pub fn range_of(data: Arc<dyn Dataset>, frames: Range<usize>) -> Result<Self> {
        let Some(times) = data.times().and_then(|times| times.get(frames.clone())) else {
            let available = data.times().map_or(0, <[f64]>::len);
            return Err(Error::OutOfRange {
                what: "frame range".to_owned(),
                asked: format!("{frames:?}"),
                available,
            });
        };
        let (times, unit) = (times.to_vec(), data.time_unit().cloned());
        Ok(Self { data, frames, times, unit })
    }
}

/// The times of a data set in another unit.
///
/// # Errors
/// Units of which one is no unit since a date, or different calendars.
pub(crate) fn times_in(data: &dyn Dataset, unit: &TimeUnit) -> Result<Vec<f64>> {
    let differ = || {
        let own = data.time_unit().map_or("without a unit".to_owned(), |own| format!("in {own}"));
        Error::Config(format!(
            "{}: its times are {own}, expected {unit}, as in the other data",
            data.path().display()
        ))
    };
    let own = data.time_unit().ok_or_else(differ)?;
    let (from, to) = (TimeAxis::new(own)?, TimeAxis::new(unit)?);
    let times = data.times().unwrap_or_default().iter();
    times.map(|&time| from.convert(time, &to)).collect::<Option<_>>().ok_or_else(differ)
}

/// The description of a prediction whose times are in `unit`, with times in the unit of the data set that writes it.
///
/// # Errors
/// A unit that is no unit since a date.
pub(crate) fn meta_for(
    data: &dyn Dataset,
    unit: Option<&TimeUnit>,
    meta: &PredictionMeta,
) -> Result<PredictionMeta> {
    let mut meta = meta.clone();
    if let (Some(unit), Some(to)) = (unit, data.time_unit())
        && unit != to
    {
        let (from, to) = (TimeAxis::new(unit)?, TimeAxis::new(to)?);
        for time in meta.times.iter_mut().chain(&mut meta.sample_times) {
            let converted = from.convert(*time, &to);
            *time = converted.ok_or_else(|| {
                let path = data.path().display();
                Error::Config(format!(
                    "{path}: its calendar lacks times of the prediction, which are in {unit}"
                ))
            })?;
        }
    }
    Ok(meta)
}

/// An end of a range of times: a number of the file's unit, or a period of a calendar.
enum Boundary {
    Number(f64),
    Period(TimeAxis, (i64, i64)),
}

impl Boundary {
    fn is_after(&self, time: f64) -> bool {
        match self {
            Self::Number(number) => time < *number,
            Self::Period(axis, (start, _)) => axis.instant(time) < *start,
        }
    }

    fn ends_before(&self, time: f64) -> bool {
        match self {
            Self::Number(number) => *number < time,
            Self::Period(axis, (_, end)) => *end <= axis.instant(time),
        }
    }
}

fn boundary(data: &dyn Dataset, key: &str, point: &TimePoint) -> Result<Boundary> {
    match point {
        TimePoint::Number(number) if number.is_finite() => Ok(Boundary::Number(*number)),
        TimePoint::Number(number) => {
            Err(Error::Config(format!("{key} has {number}, expected a finite number")))
        }
        TimePoint::Date(date) => {
            let place = |error: Error| Error::Config(format!("{key}: {}: {error}", data.path().display()));
            let Some(unit) = data.time_unit() else {
                return Err(Error::Config(format!(
                    "{key} has the date {date:?}, but the times of {} have no unit since a date: they are {} to {}; give \
                     numbers",
                    data.path().display(),
                    text(data, data.times().and_then(<[f64]>::first)),
                    text(data, data.times().and_then(<[f64]>::last))
                )));
            };
            let axis = TimeAxis::new(unit).map_err(place)?;
            Ok(Boundary::Period(axis, axis.period(date).map_err(place)?))
        }
    }
}

/// A time in messages: its date, if it has one.
fn text(data: &dyn Dataset, time: Option<&f64>) -> String {
    time_text(data.time_unit(), time)
}

/// A time in messages: its date, if its unit is one since a date.
pub(crate) fn time_text(unit: Option<&TimeUnit>, time: Option<&f64>) -> String {
    let Some(time) = time else { return "none".to_owned() };
    match unit.map(TimeAxis::new) {
        Some(Ok(axis)) => axis.text(*time),
        _ => time.to_string(),
    }
}

impl Dataset for Frames {
    forward_to_data!();

    fn samples(&self) -> usize {
        self.data.samples()
    }

    fn file_starts(&self) -> Vec<(usize, usize)> {
        let Range { start, end } = self.frames;
        let own =
            |(sample, frame): (usize, usize)| (frame < end).then(|| (sample, frame.saturating_sub(start)));
        let mut starts: Vec<(usize, usize)> = self.data.file_starts().into_iter().filter_map(own).collect();
        starts.dedup();
        starts
    }

    fn times(&self) -> Option<&[f64]> {
        Some(&self.times)
    }

    fn time_unit(&self) -> Option<&TimeUnit> {
        self.unit.as_ref()
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        check_window(self, window, samples)?;
        let first = self.frames.start;
        let frames = first + window.frames.start..first + window.frames.end;
        self.data.read(&Window { frames, points: window.points.clone() }, samples, variables)
    }

    fn create(&self, path: &Path, meta: &PredictionMeta) -> Result<Box<dyn DatasetWriter>> {
        self.data.create(path, &meta_for(&*self.data, self.unit.as_ref(), meta)?)
    }
}
