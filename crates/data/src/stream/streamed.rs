//! Samples that are read while they are needed.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::account::reading_bytes;
use super::options::StreamOptions;
use super::reader::Reader;
use super::source::{Rows, Source};
use crate::batch::Batch;
use crate::dataset::Dataset;
use crate::samples::{Request, Samples};
use crate::steps::TrainSteps;
use crate::{Error, HostMemory, Result};

/// This rank's window of samples that are read while they are needed: the same bits as [`InMemory`](crate::InMemory) gives.
///
/// ```
/// use std::sync::Arc;
///
/// use isobar_data::{DataConfig, Reader, ReaderOptions, Request, Samples, StreamOptions, Streamed};
///
/// let config = DataConfig { path: "../../tests/data/darcy_excerpt.h5".into(), ..DataConfig::default() };
/// let data = Arc::from(config.open()?);
/// let reader = Arc::new(Reader::new(ReaderOptions::default())?);
/// // The upper half of the first six samples.
/// let options = StreamOptions::new(&[0..32, 0..64], &["nu"], &["u"]);
/// let train = Streamed::new(&reader, (data, 0..6), &options)?;
///
/// let requests = [[4, 1], [0, 5]].map(|samples| Request { samples: samples.to_vec(), steps: 1 });
/// train.announce(requests.to_vec());
/// for request in &requests {
///     assert_eq!(train.take(request)?.targets[0].size(), [2, 1, 32, 64]);
/// }
/// assert_eq!(reader.account().read, 4 * 2 * 32 * 64 * 4);
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Debug)]
pub struct Streamed {
    reader: Arc<Reader>,
    source: Arc<Source>,
    steps: TrainSteps,
    options: (Kind, Device),
    at_once: usize,
    mean: OnceCell<Tensor>,
}

impl Streamed {
    /// A range of samples, or trajectories, of a data set. Reads nothing.
    ///
    /// # Errors
    /// Samples, variables or steps that the data set does not have.
    pub fn new(
        reader: &Arc<Reader>,
        part: (Arc<dyn Dataset>, Range<usize>),
        options: &StreamOptions,
    ) -> Result<Self> {
        options.steps.check()?;
        let source = Source::new(part, options)?;
        Ok(Self {
            reader: reader.clone(),
            source: Arc::new(source),
            steps: options.steps.clone(),
            options: options.options,
            at_once: options.at_once.max(1),
            mean: OnceCell::new(),
        })
    }

    /// Returns the memory that reading so many samples at once takes at most.
    pub fn needed(&self, samples: usize) -> HostMemory {
        let frames = if self.of_trajectories() { self.steps.most().saturating_add(1) } else { 1 };
        HostMemory::new(reading_bytes(&self.source, samples.min(self.len()).saturating_mul(frames)))
    }

    /// Makes the batch of a request from its rows.
    fn batch(&self, request: &Request, rows: &Rows) -> Result<Batch> {
        let firsts = request.samples.iter().map(|&sample| self.source.first(sample));
        let firsts = firsts.collect::<Result<Vec<_>>>()?;
        let (kind, device) = self.options;
        let ready = |field: Tensor| -> Result<Tensor> { Ok(field.f_to_device(device)?.f_to_kind(kind)?) };
        let empty = || -> Result<[Tensor; 2]> {
            let [input, target] = self.source.empty()?;
            Ok([ready(input)?, ready(target)?])
        };
        let times = self.source.times();
        let stacked = |step: usize| -> Result<Tensor> {
            let row = |&(sample, frame): &(usize, usize)| {
                let frame = if times.is_some() { frame + step } else { frame };
                let row = rows.get(&(sample, frame)).ok_or_else(|| {
                    Error::Invalid(format!("frame {frame} of sample {sample} was not read for its batch"))
                })?;
                Ok(row.target.as_ref().filter(|_| step > 0).unwrap_or(&row.input))
            };
            let fields = firsts.iter().map(row).collect::<Result<Vec<&Tensor>>>()?;
            ready(Tensor::f_stack(&fields, 0)?)
        };
        let (input, targets) = if firsts.is_empty() {
            let [input, target] = empty()?;
            let targets = (0..request.steps).map(|_| target.shallow_clone()).collect();
            (input, targets)
        } else {
            (stacked(0)?, (1..=request.steps).map(stacked).collect::<Result<_>>()?)
        };
        let at = |frame: usize| times.and_then(|times| times.get(frame).copied()).unwrap_or_default();
        let of_step = |step: usize| firsts.iter().map(|(_, first)| at(first + step)).collect();
        let times = if times.is_some() { (0..request.steps).map(of_step).collect() } else { Vec::new() };
        Ok(Batch { input, targets, times })
    }

    /// Visits all samples once and adds them up in their order, in float64.
    fn mean_over_all(&self) -> Result<Tensor> {
        let all: Vec<usize> = (0..self.len()).collect();
        // A quarter of the memory, so that some can be read ahead.
        let fits = self.reader.host_memory().bytes() / 4 / reading_bytes(&self.source, 2).max(1);
        let at_once = usize::try_from(fits).unwrap_or(usize::MAX).clamp(1, self.at_once);
        let requests = all.chunks(at_once).map(|samples| Request { samples: samples.to_vec(), steps: 1 });
        let requests: Vec<Request> = requests.collect();
        self.announce(requests.clone());
        let (kind, device) = self.options;
        let (mut sum, mut missing): (Option<Tensor>, Option<Tensor>) = (None, None);
        for request in &requests {
            for target in self.take(request)?.targets.iter().flat_map(|target| target.split(1, 0)) {
                let mut target = target.f_to_kind(Kind::Double)?;
                let gaps = target.f_isnan()?;
                if target.numel() > 0 && gaps.f_any()?.f_int64_value(&[])? != 0 {
                    target = target.f_nan_to_num(0.0, f64::INFINITY, f64::NEG_INFINITY)?;
                    let gaps = gaps.f_to_kind(Kind::Double)?;
                    missing = Some(match missing {
                        None => gaps,
                        Some(mut all) => all.f_add_(&gaps)?,
                    });
                }
                sum = Some(match sum {
                    None => target,
                    Some(mut sum) => sum.f_add_(&target)?,
                });
            }
        }
        let none = || Error::Invalid("there are no samples to take the mean of".to_owned());
        let (sum, count) = (sum.ok_or_else(none)?, self.len() as f64);
        let mean = match missing {
            None => sum.f_div_scalar(count)?,
            Some(missing) => sum.f_div(&missing.f_neg()?.f_add_scalar(count)?)?,
        };
        Ok(mean.f_to_device(device)?.f_to_kind(kind)?)
    }
}

impl Samples for Streamed {
    fn len(&self) -> usize {
        self.source.len()
    }

    fn steps(&self) -> usize {
        self.source.steps()
    }

    fn steps_in(&self, epoch: u64) -> usize {
        self.steps.at(epoch)
    }

    fn of_trajectories(&self) -> bool {
        self.source.times().is_some()
    }

    fn take(&self, request: &Request) -> Result<Batch> {
        self.reader.take(&self.source, request, |rows| self.batch(request, rows))
    }

    fn announce(&self, coming: Vec<Request>) {
        self.reader.announce(&self.source, coming);
    }

    fn announce_after(&self, coming: Vec<Request>) {
        self.reader.announce_after(&self.source, coming);
    }

    fn at_once(&self) -> usize {
        self.at_once
    }

    fn mean_target(&self) -> Result<Tensor> {
        if let Some(mean) = self.mean.get() {
            return Ok(mean.shallow_clone());
        }
        let mean = self.mean_over_all()?;
        Ok(self.mean.get_or_init(|| mean).shallow_clone())
    }
}
