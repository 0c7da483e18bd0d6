//! Reduction of a run's gradients.

use isobar_manager::DeviceMesh;
use tch::Tensor;

use crate::data_parallel::{DataParallel, DataParallelConfig, backward_of, broadcast, compare};
use crate::error::{Context, Error, Result};
use crate::fully_sharded::FullySharded;
use crate::gradients::classes;
use crate::params::{ParamPlacement, Parameters};
use crate::ranks::Ranks;
use crate::replicas::check_replicas;
use crate::run_check::check_run;

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
        (ranks, fields): (&Ranks, Option<&DeviceMesh>),
        config: &DataParallelConfig,
    ) -> Result<Self> {
        check_run(params, ranks, fields)?;
        if let Err(error) = make_alike(params, buffers) {
            // Ranks with other parts of other data would wait.
            ranks.world.leave(&error.to_string());
            return Err(error);
        }
        Ok(match &ranks.shards {
            None => {
                let parallel = DataParallel::new(params, buffers, &ranks.gradients, config)?;
                refuse_other_weights(params, ranks)?;
                Self::Replicated(parallel, params.clone())
            }
            Some((sharded, mesh)) => {
                Self::Sharded(FullySharded::new(sharded.clone(), params, buffers, mesh, config)?)
            }
        })
    }

    /// Returns the parameters that the optimizer steps and checkpoints save.
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

    /// Replaces the buffers by those of rank 0, as they are validated and saved: running statistics of ranks with other samples
    /// differ. All ranks call.
    pub(crate) fn share_buffers(&self) -> Result<()> {
        match self {
            Self::Replicated(parallel, _) => parallel.share_buffers(),
            Self::Sharded(parallel) => parallel.share_buffers(),
        }
    }

    /// Adds the regularization `term` to the loss of a pass over `local` of the `global` samples of the batch. Replicated parameters get its
    /// gradient at once, times `factor`, in a backward pass of its own, and its value is returned beside the loss: parameters of
    /// recomputed blocks would otherwise get two gradients in the pass that reduces them.
    pub(crate) fn regularized(
        &self,
        loss: Tensor,
        term: Option<Tensor>,
        (local, global): (usize, usize),
        factor: f64,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Some(term) = term else { return Ok((loss, None)) };
        let context = || "the regularization".to_owned();
        let term = term.f_to_kind(loss.kind()).context(context)?;
        match self {
            Self::Replicated(..) => {
                backward_of(&term, factor * local as f64 / global as f64)?;
                Ok((loss, Some(term.f_detach().context(context)?)))
            }
            Self::Sharded(_) => Ok((loss.f_add(&term).context(context)?, None)),
        }
    }

    /// Backward pass of `factor` times the mean loss over this rank's samples: `local` of the `global` samples of the batch.
    /// Gradients are summed over the ranks in the `last` pass of a step only, where they need not be earlier.
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
            // Without samples here there are none on any rank. The last pass has some, as there are no more passes than samples.
            Self::Sharded(parallel) => {
                let Some(loss) = loss else { return Ok(()) };
                let loss = times(loss, factor * local as f64 / global as f64)?;
                match last {
                    true => parallel.backward(&loss),
                    false => parallel.backward_no_sync(&loss),
                }
            }
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

/// Refuses ranks whose parameters differ where no group of the run makes them alike.
fn refuse_other_weights(params: &Parameters, ranks: &Ranks) -> Result<()> {
    if ranks.gradients.size() * params.model_group().size() >= ranks.world.size() {
        return Ok(());
    }
    match check_replicas(params, &ranks.world) {
        Err(Error::ReplicasDiffer { name, ranks, .. }) => Err(Error::WrongGradients {
            problem: format!(
                "parameter {name:?} of the ranks {ranks:?} begins with other values than that of the first rank"
            ),
            call: "give every rank one seed: `ParamStore::new(Generator::new(seed))`".to_owned(),
        }),
        other => other,
    }
}

/// Makes the parameters that a split model has on all of its ranks equal to those of the first, and those whose gradients backward
/// sums over a mesh.
fn make_alike(params: &Parameters, buffers: &[(String, Tensor)]) -> Result<()> {
    for class in classes(params)?.iter().filter(|class| !class.source.is_pending()) {
        let Some(copies) = class.source.copies()?.filter(|copies| copies.size() > 1) else { continue };
        broadcast(class.params.iter().map(|param| (&param.name, &param.tensor)), &copies)?;
        broadcast(buffers.iter().map(|(name, tensor)| (name, tensor)), &copies)?;
    }
    let group = params.model_group();
    let common = params.iter().filter(|param| param.placement == ParamPlacement::Replicate);
    let common = Parameters::over(common.cloned().collect(), group)?;
    compare(&common, &[], group)?;
    broadcast(common.iter().map(|param| (&param.name, &param.tensor)), group)
}
