//! How the gradients of a run come together.

use tch::Tensor;

use crate::data_parallel::{DataParallel, DataParallelConfig};
use crate::error::Result;
use crate::fully_sharded::FullySharded;
use crate::params::Parameters;
use crate::trainer::Ranks;

/// Whole parameters on each rank, or parts of them.
#[derive(Debug)]
pub(crate) enum Parallel {
    Replicated(DataParallel, Parameters),
    Sharded(FullySharded),
}

impl Parallel {
    pub(crate) fn new(
        params: &Parameters,
        buffers: &[(String, Tensor)],
        ranks: &Ranks,
        config: &DataParallelConfig,
    ) -> Result<Self> {
        Ok(match &ranks.shards {
            None => {
                let parallel = DataParallel::new(params, buffers, &ranks.gradients, config)?;
                Self::Replicated(parallel, params.clone())
            }
            Some((sharded, mesh)) => {
                Self::Sharded(FullySharded::new(sharded.clone(), params, buffers, mesh, config)?)
            }
        })
    }

    /// What the optimizer steps and checkpoints hold.
    pub(crate) fn parameters(&self) -> &Parameters {
        match self {
            Self::Replicated(_, params) => params,
            Self::Sharded(parallel) => parallel.parameters(),
        }
    }

    pub(crate) fn zero_grad(&self) -> Result<()> {
        match self {
            Self::Replicated(parallel, _) => parallel.zero_grad(),
            Self::Sharded(parallel) => parallel.zero_grad(),
        }
    }

    pub(crate) fn sync_buffers(&self) -> Result<()> {
        match self {
            Self::Replicated(parallel, _) => parallel.sync_buffers(),
            Self::Sharded(parallel) => parallel.sync_buffers(),
        }
    }

    /// Of the mean loss over this rank's `local` samples of `global`.
    pub(crate) fn backward(&self, loss: Option<&Tensor>, local: u64, global: u64) -> Result<()> {
        match (self, loss) {
            (Self::Replicated(parallel, _), loss) => parallel.backward(loss, local, global),
            (Self::Sharded(parallel), Some(loss)) => parallel.backward(loss),
            // A batch of nothing, which no rank has.
            (Self::Sharded(_), None) => Ok(()),
        }
    }
}
