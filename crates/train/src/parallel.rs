//! How the gradients of a run come together.

use tch::Tensor;

use crate::data_parallel::{DataParallel, DataParallelConfig, broadcast, compare};
use crate::error::{Context, Result};
use crate::fully_sharded::FullySharded;
use crate::params::{ParamPlacement, Parameters};
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
        if let Err(error) = make_alike(params) {
            // Ranks with other parts of other data would wait.
            ranks.world.leave(&error.to_string());
            return Err(error);
        }
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

    /// Of `factor` times the mean loss over this rank's samples, so many of so many of the batch. Gradients need only be summed
    /// over the ranks in the `last` pass of a step.
    pub(crate) fn backward(
        &self,
        loss: Option<&Tensor>,
        (local, global): (usize, usize),
        factor: f64,
        last: bool,
    ) -> Result<()> {
        let times = |loss: &Tensor, factor: f64| match factor {
            1.0 => Ok(loss.shallow_clone()),
            _ => loss.f_mul_scalar(factor).context(|| "scaling the loss".to_owned()),
        };
        match self {
            Self::Replicated(parallel, _) => {
                let loss = loss.map(|loss| times(loss, factor)).transpose()?;
                let (local, global) = (local as u64, global as u64);
                match last {
                    true => parallel.backward(loss.as_ref(), local, global),
                    false => parallel.backward_no_sync(loss.as_ref(), local, global),
                }
            }
            // Without samples here there are none on any rank.
            Self::Sharded(parallel) => match loss {
                Some(loss) => parallel.backward(&times(loss, factor * local as f64 / global as f64)?),
                None => Ok(()),
            },
        }
    }

    /// The parameters have new values that are no optimizer step's.
    pub(crate) fn changed(&self) -> Result<()> {
        match self {
            Self::Replicated(..) => Ok(()),
            Self::Sharded(parallel) => parallel.changed(),
        }
    }
}

/// Makes the parameters that a split model has on all of its ranks equal to those of the first.
fn make_alike(params: &Parameters) -> Result<()> {
    let group = params.model_group();
    let common = params.iter().filter(|param| param.placement == ParamPlacement::Replicate);
    let common = Parameters::over(common.cloned().collect(), group)?;
    compare(&common, &[], group)?;
    broadcast(common.iter().map(|param| (&param.name, &param.tensor)), group)
}
