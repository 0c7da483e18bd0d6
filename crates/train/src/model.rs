//! The network of a run, as the engine calls it, and the trained one before it.

use isobar_array::{Array, Pool, Reduction};
use isobar_data::Normalizer;
use isobar_models::{Batch, Denoiser, Mode, Model};

use crate::objective::ObjectiveKind;
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

    /// Returns the task that the network is trained for; by default regression.
    fn objective(&self) -> ObjectiveKind {
        ObjectiveKind::default()
    }

    /// Returns the data and noise levels of a denoiser; `None` for other networks.
    fn denoiser(&self) -> Option<Denoiser> {
        None
    }

    /// Returns the seed of the random numbers in evaluation.
    fn seed(&self) -> u64 {
        0
    }

    /// Returns true if some input channels become conditions of samples.
    fn has_conditions(&self) -> bool {
        false
    }

    /// Returns the trained network that is called before this one, if there is one.
    fn regression(&self) -> Option<&Regression<A>> {
        None
    }

    /// Computes the model's [regularization](Model::regularization) term, without dims; `None` if it has none.
    ///
    /// # Errors
    ///
    /// An operator that fails.
    fn regularization(&self) -> Result<Option<A>, BoxError> {
        Ok(None)
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
    objective: ObjectiveKind,
    denoiser: Option<Denoiser>,
    seed: u64,
    regression: Option<Box<Regression<A>>>,
    conditions: Option<Conditions>,
}

/// Input channels that are one number for each sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conditions {
    /// Number of the channels.
    pub count: usize,
    /// Number of input channels behind them.
    pub behind: usize,
}

impl Conditions {
    /// The fields without these channels, and their values `[sample, count]`.
    fn take<A: Array>(self, fields: &A) -> Result<(A, A), BoxError> {
        let [count, behind] = [self.count, self.behind].map(|channels| channels as i64);
        let shape = fields.shape();
        let before = shape.get(1).copied().unwrap_or(0) - count - behind;
        if before < 0 || before + behind == 0 {
            return Err(format!(
                "inputs {shape:?} have no fields besides {count} conditions and {behind} channels"
            )
            .into());
        }
        let dims: Vec<i64> = (2..shape.len() as i64).collect();
        // All points have the same value: the greatest one is it, without rounding. They are data: no gradient reaches them.
        let values = fields.narrow(1, before, count)?.detach()?.reduce(Reduction::Max, &dims, false)?;
        let parts = [fields.narrow(1, 0, before)?, fields.narrow(1, before + count, behind)?];
        let parts: Vec<&A> =
            parts.iter().zip([before, behind]).filter(|(_, own)| *own > 0).map(|(x, _)| x).collect();
        Ok((A::cat(&parts, 1)?, values))
    }
}

impl<A: Array> Network<A> {
    /// Wraps a model whose outputs are on the grid of its inputs.
    pub fn new(model: Box<dyn Model<A>>) -> Self {
        let objective = ObjectiveKind::default();
        Self { model, refinement: 1, objective, denoiser: None, seed: 0, regression: None, conditions: None }
    }

    /// Wraps a model whose outputs are on a grid finer by this factor along each dim. It computes with the means of the given
    /// fields over cells of so many points, so that its outputs are on the grid of the given fields.
    #[must_use]
    pub fn refining(self, factor: usize) -> Self {
        Self { refinement: factor.max(1) as i64, ..self }
    }

    /// Sets the task that the model is trained for, which also makes its predictions. `seed` is that of the random numbers in
    /// evaluation.
    #[must_use]
    pub fn objective(self, objective: impl Into<ObjectiveKind>, seed: u64) -> Self {
        Self { objective: objective.into(), seed, ..self }
    }

    /// Sets the data and noise levels of a denoiser; `None` for other models.
    #[must_use]
    pub fn denoising(self, denoiser: Option<Denoiser>) -> Self {
        Self { denoiser, ..self }
    }

    /// Sets the first-stage regression; this network models the residual of its prediction.
    #[must_use]
    pub fn after(self, regression: Option<Regression<A>>) -> Self {
        Self { regression: regression.map(Box::new), ..self }
    }
}

impl<A: Array> Network<A> {
    /// Wraps a model that is given some input channels as one vector for each sample: its array `conditions`, or, of a denoiser,
    /// `class_labels`.
    #[must_use]
    pub fn conditioned(self, conditions: Option<Conditions>) -> Self {
        Self { conditions, ..self }
    }

    /// The batch in which the conditions of samples are an array.
    fn with_conditions(&self, mut batch: Batch<A>) -> Result<Batch<A>, BoxError> {
        let Some(conditions) = self.conditions else { return Ok(batch) };
        // A denoiser is given noise levels, and its inputs as conditions on the grid.
        let (inputs, of_samples) = match batch.get(Batch::<A>::SIGMA) {
            None => (Batch::<A>::FIELDS, Batch::<A>::CONDITIONS),
            Some(_) => (Batch::<A>::CONDITIONS, Batch::<A>::CLASS_LABELS),
        };
        let Some(fields) = batch.take(inputs) else { return Ok(batch) };
        let (fields, values) = conditions.take(&fields)?;
        Ok(batch.with(inputs, fields).with(of_samples, values))
    }
}

impl<A: Array> Forward<A> for Network<A> {
    fn forward(&self, batch: Batch<A>, step: Option<Step<'_>>) -> Result<A, BoxError> {
        let mut batch = self.with_conditions(batch)?;
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

    fn objective(&self) -> ObjectiveKind {
        self.objective.clone()
    }

    fn denoiser(&self) -> Option<Denoiser> {
        self.denoiser.clone()
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn has_conditions(&self) -> bool {
        self.conditions.is_some()
    }

    fn regression(&self) -> Option<&Regression<A>> {
        self.regression.as_deref()
    }

    fn regularization(&self) -> Result<Option<A>, BoxError> {
        Ok(self.model.regularization()?)
    }
}

/// A trained network R to whose predictions a denoiser's samples are added: Mardani et al., *Residual Corrective Diffusion Modeling for
/// Km-scale Atmospheric Downscaling* (CorrDiff), arXiv:2309.15214.
///
/// With inputs x and targets y, normalised, the denoiser learns the distribution of r = y − R(x) under the conditions x, and a
/// prediction is R(x) + r. R is evaluated without a graph, on the layout of the fields. PhysicsNeMo: `ResidualLoss`.
pub struct Regression<A> {
    network: Network<A>,
    input: Normalizer,
    target: Normalizer,
    beside: [Option<Normalizer>; 2],
    conditions: bool,
}

impl<A: Array> Regression<A> {
    /// Wraps a network that maps inputs to targets, normalised by `[input, target]`.
    pub fn new(network: Network<A>, [input, target]: [Normalizer; 2]) -> Self {
        Self { network, input, target, beside: [None, None], conditions: false }
    }

    /// Says by what its stored forcings and its static fields are normalised: `[forcings, statics]`.
    #[must_use]
    pub fn beside(self, beside: [Option<Normalizer>; 2]) -> Self {
        Self { beside, ..self }
    }

    /// Returns the normalizers of inputs and targets, and those of stored forcings and static fields, if there are some.
    pub fn normalizers(&self) -> ([&Normalizer; 2], [Option<&Normalizer>; 2]) {
        ([&self.input, &self.target], [self.beside[0].as_ref(), self.beside[1].as_ref()])
    }

    /// Compares the normalisation of stored forcings and static fields, `[forcings, statics]`, with that of the denoiser's, which it is
    /// given.
    ///
    /// # Errors
    ///
    /// They differ.
    pub fn check_beside(&self, beside: [Option<&Normalizer>; 2]) -> Result<(), BoxError> {
        for ((what, first), second) in ["forcings", "static fields"].iter().zip(&self.beside).zip(beside) {
            match (first, second) {
                (Some(first), Some(second)) => check(what, first, second)?,
                (None, None) => {}
                (first, _) => {
                    let [with, without] = match first {
                        Some(_) => ["regression", "denoiser"],
                        None => ["denoiser", "regression"],
                    };
                    return Err(format!(
                        "the {with} was trained with normalised {what}, and the {without} has none; train both on the same variables"
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    /// Gives the denoiser the prediction R(x) too, as channels before those of x (PhysicsNeMo: `hr_mean_conditioning`).
    #[must_use]
    pub fn conditioning(self, conditions: bool) -> Self {
        Self { conditions, ..self }
    }

    /// True if the prediction is also an input of the denoiser.
    pub(crate) fn is_input(&self) -> bool {
        self.conditions
    }

    /// Computes R(x) of the inputs of a task, and the inputs of its denoiser. `input` and `target` are the scales of the denoiser.
    pub(crate) fn apply(
        &self,
        inputs: Batch<A>,
        [input, target]: [&Normalizer; 2],
    ) -> Result<(Batch<A>, A), BoxError> {
        check("inputs", &self.input, input)?;
        check("targets", &self.target, target)?;
        let given = inputs.names().filter_map(|name| Some((name, inputs.get(name)?.shallow_clone())));
        let copied = given.fold(Batch::default(), |batch, (name, array)| batch.with(name, array));
        let fields = inputs.require("a regression", Batch::<A>::FIELDS)?.shallow_clone();
        let mean = {
            let _no_grad = tch::no_grad_guard();
            self.network.forward(copied, None)?.to_kind(fields.kind())?
        };
        let inputs = match self.conditions {
            true => inputs.with(Batch::<A>::FIELDS, A::cat(&[&mean, &fields], 1)?),
            false => inputs,
        };
        Ok((inputs, mean))
    }
}

/// Compares the scales of both stages.
fn check(what: &str, first: &Normalizer, second: &Normalizer) -> Result<(), BoxError> {
    if first.is_close_to(second) {
        return Ok(());
    }
    Err(format!(
        "the regression was trained with {what} of mean {:?} and standard deviation {:?}, and the denoiser's have {:?} and {:?}; train \
         both on the same samples and variables",
        first.mean(),
        first.std(),
        second.mean(),
        second.std()
    )
    .into())
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    /// In rollouts, the fields beside the conditions are predictions, which have a graph.
    #[test]
    fn conditions_have_no_graph() {
        let input = Tensor::rand([2, 4, 3, 5], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let (fields, values) = Conditions { count: 2, behind: 1 }.take(&(&input * 1.0)).unwrap();
        assert_eq!((fields.size(), values.size()), (vec![2, 2, 3, 5], vec![2, 2]));
        assert!(fields.requires_grad());
        assert!(!values.requires_grad());
    }
}
