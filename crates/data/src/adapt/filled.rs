//! Missing values, replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use isobar_torch::memory::from_vec;
use tch::Tensor;

use crate::calendar::TimeUnit;
use crate::dataset::{Dataset, Window, choose};
use crate::dataset_writer::DatasetWriter;
use crate::grid::PredictionMeta;
use crate::{DataVariable, Error, Normalizer, Result, Statistics};

/// A data set whose missing values, which its reader gives as NaN, are replaced by a number that is the same after
/// normalisation: the mean of the channel over the training samples plus `fill` standard deviations.
///
/// Statistics leave missing values out.
#[derive(Debug)]
pub(crate) struct Filled {
    data: Arc<dyn Dataset>,
    fills: Arc<Fills>,
}

/// Numbers that replace missing values, by variable: from scales that are given, or else from statistics of the training samples,
/// which are computed at the first gap.
#[derive(Debug)]
pub(crate) struct Fills {
    training: Arc<dyn Dataset>,
    samples: Range<usize>,
    fill: f64,
    /// Variables whose missing values stay NaN.
    kept: BTreeSet<String>,
    /// One number for each channel.
    known: Mutex<BTreeMap<String, Vec<f32>>>,
}

impl Fills {
    /// Makes the numbers from `samples` of `training`, in which missing values are NaN.
    pub(crate) fn new(
        training: Arc<dyn Dataset>,
        samples: Range<usize>,
        fill: f64,
        kept: BTreeSet<String>,
    ) -> Arc<Self> {
        Arc::new(Self { training, samples, fill, kept, known: Mutex::default() })
    }

    /// Computes the numbers from the scales of the variables' channels, in the order of `variables`.
    ///
    /// # Errors
    /// Unknown variables, or scales for another number of channels.
    pub(crate) fn set_scales(&self, variables: &[&str], scales: &Normalizer) -> Result<()> {
        let chosen = choose(&*self.training, variables)?;
        let channels: usize = chosen.iter().map(|variable| variable.channels.len()).sum();
        let (mean, std) = (scales.mean(), scales.std());
        if mean.len() != channels && mean.len() != 1 {
            return Err(Error::Invalid(format!(
                "scales of {} channels for the {channels} of {variables:?}; give one scale for each channel, or one for all",
                mean.len()
            )));
        }
        // A single mean and standard deviation apply to all channels.
        let mut scales = mean.iter().zip(std).cycle().map(|(mean, std)| self.number(*mean, *std));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for variable in chosen {
            let fills = scales.by_ref().take(variable.channels.len()).collect();
            known.insert(variable.name, fills);
        }
        Ok(())
    }

    fn number(&self, mean: f64, std: f64) -> f32 {
        (mean + self.fill * std) as f32
    }

    /// One number for each channel of a variable.
    fn of(&self, variable: &DataVariable) -> Result<Vec<f32>> {
        let name = variable.name.as_str();
        if self.kept.contains(name) {
            return Ok(vec![f32::NAN; variable.channels.len()]);
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fills) = known.get(name) {
            return Ok(fills.clone());
        }
        let statistics = self.training.statistics(&[name], self.samples.clone())?;
        let fill = |(channel, of): (&String, Option<Statistics>)| {
            let of = of.ok_or_else(|| no_values(&*self.training, channel))?;
            Ok(self.number(of.mean, of.std))
        };
        let fills = variable.channels.iter().zip(statistics).map(fill).collect::<Result<Vec<f32>>>()?;
        known.insert(name.to_owned(), fills.clone());
        Ok(fills)
    }
}

/// Says which channel has no value to fill gaps by.
fn no_values(data: &dyn Dataset, channel: &str) -> Error {
    let path = data.path().display();
    Error::Config(format!(
        "{path}: all values of `{channel}` are missing in the training samples, so that nothing says what to fill them with"
    ))
}

impl Filled {
    pub(crate) fn new(data: Arc<dyn Dataset>, fills: &Arc<Fills>) -> Self {
        Self { data, fills: Arc::clone(fills) }
    }
}

impl Dataset for Filled {
    forward_to_data!();

    fn samples(&self) -> usize {
        self.data.samples()
    }

    fn times(&self) -> Option<&[f64]> {
        self.data.times()
    }

    fn file_starts(&self) -> Vec<(usize, usize)> {
        self.data.file_starts()
    }

    fn uncut_times(&self) -> Option<&[f64]> {
        self.data.uncut_times()
    }

    fn sample_times(&self) -> Option<Vec<f64>> {
        self.data.sample_times()
    }

    fn time_unit(&self) -> Option<&TimeUnit> {
        self.data.time_unit()
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let values = self.data.read(window, samples, variables)?;
        let missing = values.f_isnan()?;
        if missing.numel() == 0 || missing.f_any()?.f_int64_value(&[])? == 0 {
            return Ok(values);
        }
        let fills = choose(&*self.data, variables)?
            .iter()
            .map(|variable| self.fills.of(variable))
            .collect::<Result<Vec<_>>>()?
            .concat();
        let mut shape = vec![1; values.dim()];
        shape[2] = fills.len() as i64;
        Ok(from_vec(fills, &shape)?.f_expand_as(&values)?.f_where_self(&missing, &values)?)
    }

    fn statistics(&self, variables: &[&str], samples: Range<usize>) -> Result<Vec<Option<Statistics>>> {
        self.data.statistics(variables, samples)
    }

    fn change_statistics(
        &self,
        variables: &[&str],
        samples: Range<usize>,
    ) -> Result<Vec<Option<Statistics>>> {
        self.data.change_statistics(variables, samples)
    }

    fn create(&self, path: &Path, meta: &PredictionMeta) -> Result<Box<dyn DatasetWriter>> {
        self.data.create(path, meta)
    }
}
