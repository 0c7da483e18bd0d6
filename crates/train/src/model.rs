//! The network of a run, as the engine calls it.

use isobar_array::{Array, Pool};
use isobar_models::{Batch, Mode, Model};

use crate::denoising::Denoising;
use crate::task::{BoxError, Step};

/// The network of a [`FieldModel`](crate::FieldModel): a closure from fields to fields, or a [`Network`].
pub trait Forward<A> {
    /// Computes the output fields `[sample, channel, spatial…]` of normalised inputs; `step` while training, `None` for
    /// evaluation.
    ///
    /// # Errors
    ///
    /// An input of another shape than the network takes, or an operator that fails.
    fn forward(&self, batch: Batch<A>, step: Option<Step<'_>>) -> Result<A, BoxError>;

    /// How the network is trained and predicts, if it is a denoiser; `None` for one that computes its outputs at once.
    fn denoising(&self) -> Option<&Denoising> {
        None
    }
}

impl<A: Array, F> Forward<A> for F
where
    F: Fn(&A, Option<Step<'_>>) -> Result<A, BoxError>,
{
    fn forward(&self, batch: Batch<A>, step: Option<Step<'_>>) -> Result<A, BoxError> {
        self(batch.require("a closure", Batch::<A>::FIELDS)?, step)
    }
}

/// A [`Model`] as the network of a run.
pub struct Network<A> {
    model: Box<dyn Model<A>>,
    refinement: i64,
    denoising: Option<Denoising>,
}

impl<A: Array> Network<A> {
    /// Wraps a model whose outputs are on the grid of its inputs.
    pub fn new(model: Box<dyn Model<A>>) -> Self {
        Self { model, refinement: 1, denoising: None }
    }

    /// Wraps a model whose outputs are on a grid finer by this factor along each dim. It computes with the means of the given
    /// fields over cells of so many points, so that its outputs are on the grid of the given fields.
    #[must_use]
    pub fn refining(self, factor: usize) -> Self {
        Self { refinement: factor.max(1) as i64, ..self }
    }

    /// Wraps a denoiser: it is trained to remove noise, and a prediction is a sample that is drawn with it.
    #[must_use]
    pub fn denoising(self, denoising: Option<Denoising>) -> Self {
        Self { denoising, ..self }
    }
}

impl<A: Array> Forward<A> for Network<A> {
    fn forward(&self, mut batch: Batch<A>, step: Option<Step<'_>>) -> Result<A, BoxError> {
        if self.refinement > 1
            && let Some(fields) = batch.take(Batch::<A>::FIELDS)
        {
            let dims = fields.shape().len().saturating_sub(2);
            let coarse = fields.avg_pool(dims, &Pool::new(&[self.refinement]))?;
            batch = batch.with(Batch::<A>::FIELDS, coarse);
        }
        let mode = step.map_or(Mode::Eval, |step| Mode::train_part(step.generator, step.offset, step.total));
        let mut outputs = self.model.forward(&batch, mode)?;
        outputs.take(Batch::<A>::FIELDS).ok_or_else(|| "the model returned no fields".into())
    }

    fn denoising(&self) -> Option<&Denoising> {
        self.denoising.as_ref()
    }
}
