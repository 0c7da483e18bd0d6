//! The face of samples for training: in memory, or read while they are needed.

use std::fmt::Debug;

use tch::Tensor;

use crate::Result;
use crate::batch::{Batch, InMemory};

/// Samples to take at once, and the steps of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Numbers of the samples, in the order of the batch.
    pub samples: Vec<usize>,
    /// Steps after the input of each sample; 1 for samples without time.
    pub steps: usize,
}

/// A rank's window of the samples of training or validation, numbered from 0.
///
/// [`InMemory`] holds all of them; [`Streamed`](crate::Streamed) reads those that are asked for. Both give the same bits.
/// Nothing here communicates.
pub trait Samples: Debug {
    /// Number of samples.
    fn len(&self) -> usize;

    /// Returns whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Most steps after the input of a sample.
    fn steps(&self) -> usize;

    /// Steps of a sample in an epoch, counted from 0.
    fn steps_in(&self, _epoch: u64) -> usize {
        self.steps()
    }

    /// Returns whether inputs and targets are frames of the same trajectories.
    fn of_trajectories(&self) -> bool;

    /// Returns the requested samples: `[sample, channel, x, …]` each.
    ///
    /// # Errors
    /// A sample or number of steps that does not exist, and data that cannot be read.
    fn take(&self, request: &Request) -> Result<Batch>;

    /// Announces the next requests in order, for prefetching, and replaces earlier announcements. Samples that share a
    /// [`Reader`](crate::Reader) are read in the order in which they were first announced.
    fn announce(&self, _coming: Vec<Request>) {}

    /// Says which requests follow all that were announced, of these samples and of those that share their
    /// [`Reader`](crate::Reader).
    fn announce_after(&self, _coming: Vec<Request>) {}

    /// Number of samples to take at a time where all are visited: the same on every rank.
    fn at_once(&self) -> usize {
        AT_ONCE
    }

    /// Returns the mean over all samples of the first target, `[1, channel, x, …]`; missing values (NaN) have no part.
    ///
    /// # Errors
    /// Those of [`Samples::take`].
    fn mean_target(&self) -> Result<Tensor>;
}

/// Number of samples in memory to take at a time.
const AT_ONCE: usize = 64;

impl Samples for InMemory {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn steps(&self) -> usize {
        Self::steps(self)
    }

    fn steps_in(&self, epoch: u64) -> usize {
        Self::steps_in(self, epoch)
    }

    fn of_trajectories(&self) -> bool {
        Self::of_trajectories(self)
    }

    fn take(&self, request: &Request) -> Result<Batch> {
        self.batch_of(&request.samples, request.steps)
    }

    fn mean_target(&self) -> Result<Tensor> {
        let targets = self.targets();
        let mean = targets.f_mean_dim(0, true, None)?;
        // A missing value makes the mean at its point NaN. A mask of all values would take a quarter of their memory.
        let is_missing = targets.numel() > 0 && mean.f_isnan()?.f_any()?.f_int64_value(&[])? != 0;
        Ok(if is_missing { targets.f_nanmean([0].as_slice(), true, None)? } else { mean })
    }
}

impl From<InMemory> for Box<dyn Samples> {
    fn from(samples: InMemory) -> Self {
        Box::new(samples)
    }
}
