//! Missing values, replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use isobar_torch::memory::from_vec;
use tch::Tensor;

use crate::calendar::TimeUnit;
use crate::dataset::{Dataset, DatasetWriter, Window, choose};
use crate::grid::PredictionMeta;
use crate::{Error, Result, Statistics};

/// A data set whose missing values, which its reader gives as NaN, are replaced by a number that is the same after
/// normalisation: the mean of the channel over the training samples plus `fill` standard deviations.
///
/// Statistics leave missing values out.
#[derive(Debug)]
pub(crate) struct Filled {
    data: Arc<dyn Dataset>,
    training: Arc<Training>,
}

/// Statistics of the training samples, computed once for each variable.
#[derive(Debug)]
pub(crate) struct Training {
    data: Arc<dyn Dataset>,
    samples: Range<usize>,
    fill: f64,
    /// Variables whose missing values stay NaN.
    kept: BTreeSet<String>,
    known: Mutex<BTreeMap<String, Vec<Option<Statistics>>>>,
}

impl Training {
    /// Of these samples, with missing values as NaN.
    pub(crate) fn new(
        data: Arc<dyn Dataset>,
        samples: Range<usize>,
        fill: f64,
        kept: BTreeSet<String>,
    ) -> Arc<Self> {
        Arc::new(Self { data, samples, fill, kept, known: Mutex::default() })
    }

    fn statistics(&self, variables: &[&str]) -> Result<Vec<Option<Statistics>>> {
        let mut all = Vec::new();
        for &name in variables {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if !known.contains_key(name) {
                known.insert(name.to_owned(), self.data.statistics(&[name], self.samples.clone())?);
            }
            all.extend(known.get(name).into_iter().flatten().copied());
        }
        Ok(all)
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
    pub(crate) fn new(data: Arc<dyn Dataset>, training: &Arc<Training>) -> Self {
        Self { data, training: Arc::clone(training) }
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
        let mut fills = Vec::new();
        for variable in choose(&*self.data, variables)? {
            if self.training.kept.contains(&variable.name) {
                fills.extend(variable.channels.iter().map(|_| f32::NAN));
                continue;
            }
            let statistics = self.training.statistics(&[&variable.name])?;
            for (channel, of) in variable.channels.iter().zip(statistics) {
                let of = of.ok_or_else(|| no_values(&*self.training.data, channel))?;
                fills.push((of.mean + self.training.fill * of.std) as f32);
            }
        }
        let mut shape = vec![1; values.dim()];
        shape[2] = fills.len() as i64;
        Ok(from_vec(fills, &shape)?.f_expand_as(&values)?.f_where_self(&missing, &values)?)
    }

    fn statistics(&self, variables: &[&str], samples: Range<usize>) -> Result<Vec<Option<Statistics>>> {
        if Arc::ptr_eq(&self.data, &self.training.data) && samples == self.training.samples {
            return self.training.statistics(variables);
        }
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
