//! Training, validation and test samples of a configuration.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use crate::adapt::{Filled, Fills, Frames, Stills};
use crate::calendar::{TimeAxis, TimePoint, TimeUnit};
use crate::compatible;
use crate::config::{DataConfig, Missing};
use crate::dataset::Dataset;
use crate::gaps::lost_steps;
use crate::joined::DataPath;
use crate::pairs::{Sets, check_pairs};
use crate::{Error, Normalizer, Result};

/// Samples of a data set.
#[derive(Clone, Debug)]
pub struct Part {
    /// The data set.
    pub data: Arc<dyn Dataset>,
    /// Numbers of the samples, or trajectories.
    pub samples: Range<usize>,
    /// The data set of the targets, if it is not `data`: of samples with the same numbers, which may be on another grid.
    pub target: Option<Arc<dyn Dataset>>,
}

impl Part {
    /// The data set of the targets.
    pub fn targets(&self) -> &Arc<dyn Dataset> {
        self.target.as_ref().unwrap_or(&self.data)
    }
}

/// Data sets of a run. Where the configuration names one file and no times, all are of the same data set.
///
/// All have the same dims and the same variables, and times in the same unit.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Training samples.
    pub train: Part,
    /// Validation samples; may be empty.
    pub validation: Part,
    /// Test samples, if the configuration names some.
    pub test: Option<Part>,
    stored: Part,
    /// Of the inputs' data sets and of the targets', if missing values are replaced.
    fills: [Option<Arc<Fills>>; 2],
}

impl Parts {
    /// The samples that a prediction is made for by default: of the test set, or else the validation samples.
    pub fn predicted(&self) -> &Part {
        self.test.as_ref().unwrap_or(&self.validation)
    }

    /// Converts times with a reference date to another unit.
    fn in_unit(self, unit: &str) -> Result<Self> {
        let converted = |part: Part| -> Result<Part> {
            let own = part.data.time_unit().filter(|own| TimeAxis::new(own).is_ok());
            let (Some(own), Some(_)) = (own, part.data.times()) else { return Ok(part) };
            let unit = TimeUnit { unit: unit.to_owned(), calendar: own.calendar.clone() };
            if *own == unit {
                return Ok(part);
            }
            Ok(Part { data: Arc::new(Frames::in_unit(Arc::clone(&part.data), &unit)?), ..part })
        };
        let Self { train, validation, test, fills, .. } = self;
        let [train, validation] = [converted(train)?, converted(validation)?];
        Ok(Self { stored: train.clone(), train, validation, test: test.map(converted).transpose()?, fills })
    }

    /// The training samples with NaN where values are missing, if they may be.
    pub fn stored(&self) -> &Part {
        &self.stored
    }

    /// Sets the scales of input variables, in the order of their channels. If `missing` is "fill" or "mask", missing values are
    /// replaced by the number that these scales normalise to `fill`.
    ///
    /// If no scales are set, each process reads all training samples of a variable at its first missing value.
    ///
    /// # Errors
    /// Unknown variables, scales of another number of channels.
    pub fn set_scales(&self, variables: &[&str], scales: &Normalizer) -> Result<()> {
        self.fills[0].as_ref().map_or(Ok(()), |fills| fills.set_scales(variables, scales))
    }

    /// [`set_scales`](Self::set_scales) for variables of the targets, which may be in a data set of their own.
    ///
    /// # Errors
    /// Those of [`set_scales`](Self::set_scales).
    pub fn set_target_scales(&self, variables: &[&str], scales: &Normalizer) -> Result<()> {
        match &self.fills[1] {
            Some(fills) => fills.set_scales(variables, scales),
            None => self.set_scales(variables, scales),
        }
    }
}

impl DataConfig {
    /// Opens the data sets, from metadata only. Each rank calls by itself; nothing communicates.
    ///
    /// If there are fewer samples than `validation_samples`, no training sample is left.
    ///
    /// # Errors
    /// Those of [`DataConfig::open`]; data sets of different dims or variables, times that select no frames, training and
    /// validation times of one data set that overlap by more than one frame.
    pub fn parts(&self) -> Result<Parts> {
        self.with_folders()?.resolved_parts(None)
    }

    /// Opens the data sets as [`parts`](Self::parts) does, with times in a unit such as `hours since 1970-01-01`. Times without a
    /// reference date, and those of samples without frames, are unchanged.
    ///
    /// # Errors
    /// Those of [`parts`](Self::parts); a `unit` without a reference date.
    pub fn parts_in_unit(&self, unit: &str) -> Result<Parts> {
        self.with_folders()?.resolved_parts(Some(unit))
    }

    /// Opens the training samples as [`parts`](Self::parts) does, but with NaN where values are missing, if they may be.
    ///
    /// # Errors
    /// Those of [`parts`](Self::parts).
    pub fn train_part(&self) -> Result<Part> {
        Ok(self.with_folders()?.stored_parts()?.stored)
    }

    /// The data sets, where `path` is not one of three folders.
    fn resolved_parts(&self, unit: Option<&str>) -> Result<Parts> {
        let parts = self.stored_parts()?;
        let parts = match unit {
            Some(unit) => parts.in_unit(unit)?,
            None => parts,
        };
        Ok(match self.missing {
            Missing::Error => parts,
            Missing::Fill => filled(parts, self.fill, BTreeSet::new()),
            Missing::Mask => {
                // Outputs keep their missing values, which are the mask.
                let default = parts.train.data.default_pair().filter(|_| self.targets.is_empty());
                let default = default.map(|[_, target]| target.to_owned());
                let outputs = self.fields.iter().chain(&self.diagnostics).chain(&self.targets).cloned();
                let outputs = outputs.chain(default).collect();
                filled(parts, self.fill, outputs)
            }
        })
    }

    /// The data sets as they are stored, with NaN where values are missing.
    fn stored_parts(&self) -> Result<Parts> {
        self.check()?;
        self.check_target()?;
        let (mut sets, mut targets) = (self.sets()?, None);
        if let Some(config) = self.of_targets()? {
            let own = config.sets().map_err(|error| match error {
                Error::Config(problem) => Error::Config(format!("[data.target]: {problem}")),
                error => error,
            })?;
            check_pairs(&sets, &own)?;
            // Inputs and targets of the same time are a sample.
            (sets, targets) = (sets.map(Stills::of), Some(own.map(Stills::of)));
        }
        let separate = sets.validation.is_some();
        let samples = sets.train.samples();
        let split = if separate { samples } else { samples.saturating_sub(self.validation_samples) };
        let most = self.train_samples.unwrap_or(split).min(split);
        let all = |data: Arc<dyn Dataset>, target| Part { samples: 0..data.samples(), data, target };
        let of = |of: fn(&Sets) -> Option<&Arc<dyn Dataset>>| targets.as_ref().and_then(of).cloned();
        let target = of(|targets| Some(&targets.train));
        let train = Part { data: sets.train, samples: 0..most, target };
        Ok(Parts {
            validation: match sets.validation {
                Some(validation) => all(validation, of(|targets| targets.validation.as_ref())),
                None => Part {
                    data: Arc::clone(&train.data),
                    samples: split..samples,
                    target: train.target.clone(),
                },
            },
            stored: train.clone(),
            train,
            fills: [None, None],
            test: sets.test.map(|test| all(test, of(|targets| targets.test.as_ref()))),
        })
    }

    /// Opens the data sets of the inputs; for other keys than [`DataConfig::of_targets`] gives, also those of the targets.
    fn sets(&self) -> Result<Sets> {
        let whole = self.opened(&self.path)?;
        let train = limited(&whole, "data.train_times", self.train_times.as_ref())?;
        let validation =
            self.part(&whole, "validation", self.validation_path.as_ref(), &self.validation_times)?;
        let test = self.part(&whole, "test", self.test_path.as_ref(), &self.test_times)?;
        for (key, other, path) in
            [("validation", &validation, &self.validation_path), ("test", &test, &self.test_path)]
        {
            if let (Some(other), None) = (other, path) {
                check_overlap(&*train, &**other, key, self.history)?;
            }
        }
        Ok(Sets { train, validation, test })
    }

    /// Opens a data set, with the frames of `data.times`.
    fn opened(&self, path: &DataPath) -> Result<Arc<dyn Dataset>> {
        let data = Arc::from(self.open_at(path)?);
        if let Some(lost) = lost_steps(&*data) {
            tracing::warn!("{lost}");
        }
        limited(&data, "data.times", self.times.as_ref())
    }

    /// The validation or test set, if the configuration names one: of another file, or of other times.
    fn part(
        &self,
        whole: &Arc<dyn Dataset>,
        key: &str,
        path: Option<&DataPath>,
        times: &Option<[TimePoint; 2]>,
    ) -> Result<Option<Arc<dyn Dataset>>> {
        if path.is_none() && times.is_none() {
            return Ok(None);
        }
        let Some(path) = path else {
            return Ok(Some(limited(whole, &format!("data.{key}_times"), times.as_ref())?));
        };
        // Numbers select times in the file's own unit.
        let other = limited(&self.opened(path)?, &format!("data.{key}_times"), times.as_ref())?;
        compatible::check(&**whole, &*other, &format!("data.{key}_path"))?;
        Ok(Some(match whole.time_unit() {
            Some(unit) if other.times().is_some() && other.time_unit() != Some(unit) => {
                Arc::new(Frames::in_unit(other, unit)?)
            }
            _ => other,
        }))
    }
}

/// The frames of a range of times.
fn limited(data: &Arc<dyn Dataset>, key: &str, times: Option<&[TimePoint; 2]>) -> Result<Arc<dyn Dataset>> {
    Ok(match times {
        Some(times) => Arc::new(Frames::between(Arc::clone(data), key, times)?),
        None => Arc::clone(data),
    })
}

/// Rejects frames that are in both parts of a data set, except as many as an input has: they keep the samples at a cut, and are no
/// targets of the later part.
fn check_overlap(train: &dyn Dataset, other: &dyn Dataset, key: &str, history: usize) -> Result<()> {
    let (Some([first, .., last]), Some(times)) = (train.times(), other.times()) else { return Ok(()) };
    let shared = times.iter().filter(|time| (*first..=*last).contains(*time)).count();
    if shared <= history.max(1) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "data.{key}_times and data.train_times select {shared} frames of {} both; expected ranges that share at most the {} of \
         an input at their cut",
        train.path().display(),
        if history > 1 { format!("{history} frames") } else { "frame".to_owned() }
    )))
}

/// Replaces missing values of all parts, by statistics of the training samples, but for some variables.
fn filled(parts: Parts, fill: f64, kept: BTreeSet<String>) -> Parts {
    let Parts { train, validation, test, stored, .. } = parts;
    let fills =
        |data: &Arc<dyn Dataset>| Fills::new(Arc::clone(data), stored.samples.clone(), fill, kept.clone());
    let (inputs, targets) = (fills(&stored.data), stored.target.as_ref().map(fills));
    let part = |part: Part| Part {
        data: Arc::new(Filled::new(part.data, &inputs)),
        samples: part.samples,
        target: part
            .target
            .zip(targets.as_ref())
            .map(|(data, fills)| -> Arc<dyn Dataset> { Arc::new(Filled::new(data, fills)) }),
    };
    let (train, validation, test) = (part(train), part(validation), test.map(part));
    Parts { train, validation, test, stored, fills: [Some(inputs), targets] }
}
