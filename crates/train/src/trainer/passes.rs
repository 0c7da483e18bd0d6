//! Forward and backward passes of a step.

use isobar_array::Generator;
use isobar_collectives::Group;
use isobar_collectives::flight::Phase;
use isobar_data::part;
use isobar_torch::guard::Autocast;
use tch::Tensor;

use crate::config::TrainConfig;
use crate::error::{Context, Error, Result};
use crate::parallel::Parallel;
use crate::ranks::Ranks;
use crate::task::{Step, Task, share};

/// Mean loss of this rank's samples of a pass, and their number.
pub(super) type OwnLoss = (Tensor, usize);

/// Everything that the passes of a step need.
pub(super) struct Passes<'a, T> {
    pub(super) task: &'a T,
    pub(super) ranks: &'a Ranks,
    pub(super) train: &'a TrainConfig,
    pub(super) parallel: &'a Parallel,
    /// The run's seed.
    pub(super) seed: u64,
    /// Number of the step, from 0.
    pub(super) step: u64,
}

impl<T: Task> Passes<'_, T> {
    /// Runs forward and backward passes over this rank's samples of a batch, one after another over `train.accumulate` parts of them.
    /// Gradients are those of the loss times `factor`. `precision` returns the autocast guard of a forward pass; `mark` is called at the
    /// start of each phase.
    pub(super) fn run(
        &self,
        (epoch, batch): (u64, &[usize]),
        factor: f64,
        precision: impl Fn() -> Result<Option<Autocast>>,
        mut mark: impl FnMut(Phase),
    ) -> Result<Vec<OwnLoss>> {
        let Self { task, parallel, .. } = self;
        mark(Phase::Data);
        // Of the seed and the step alone, so that ranks without samples, which draw nothing, stay in step.
        let seed = Generator::new(self.seed).fork("train");
        parallel.zero_grad()?;
        parallel.sync_buffers()?;
        let passes = own_passes(batch, &self.ranks.data, self.train.accumulate);
        let count = passes.len();
        let mut losses = Vec::new();
        for (pass, (samples, offset)) in passes.enumerate() {
            mark(Phase::Forward);
            // Random numbers go by a sample's place in the batch, whichever pass it is in.
            let generator = seed.fork(&self.step.to_string());
            let pair = match samples.is_empty() {
                true => None,
                false => {
                    let step = Step {
                        epoch,
                        offset: offset as i64,
                        total: batch.len() as i64,
                        generator: &generator,
                    };
                    let _precision = precision()?;
                    let loss = task.loss(step, samples);
                    let pair = loss.and_then(|loss| Ok((loss, task.regularization()?)));
                    Some(pair.map_err(|source| Error::Task { context: "the loss of a step", source })?)
                }
            };
            mark(Phase::Backward);
            let (own, last) = ((samples.len(), batch.len()), pass + 1 == count);
            let loss = pair.map(|(loss, term)| parallel.regularized(loss, term, own, factor)).transpose()?;
            parallel.backward(loss.as_ref().map(|(loss, _)| loss), own, factor, last)?;
            if let Some((loss, beside)) = loss {
                let total = || match &beside {
                    Some(term) => loss.f_detach()?.f_add(term),
                    None => loss.f_detach(),
                };
                losses.push((total().context(|| "the loss of a step".to_owned())?, samples.len()));
            }
        }
        Ok(losses)
    }
}

/// Returns this rank's samples of each pass over a batch, and the index of the first of them in the batch.
pub(super) fn own_passes<'b>(
    batch: &'b [usize],
    data: &Group,
    accumulate: usize,
) -> impl ExactSizeIterator<Item = (&'b [usize], usize)> + use<'b> {
    let own = part(batch, data.rank(), data.size());
    let first = share(batch.len(), data.rank(), data.size()).start;
    // More passes than samples have nothing to do.
    let count = accumulate.min(batch.len().max(1));
    (0..count).map(move |pass| {
        let range = share(own.len(), pass, count);
        (&own[range.clone()], first + range.start)
    })
}
