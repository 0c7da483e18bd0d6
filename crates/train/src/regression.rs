//! The first of two stages: a trained network that predicts the mean, from which a denoiser's samples deviate.

use isobar_array::Array;
use isobar_data::Normalizer;
use isobar_models::Batch;

use crate::model::{Forward, Network};
use crate::task::BoxError;

/// Largest difference of the scales of both stages, in units of the deviation.
const TOLERANCE: f64 = 1e-6;

/// A trained network R to whose predictions a denoiser's samples are added: Mardani et al., *Residual Corrective Diffusion Modeling for
/// Km-scale Atmospheric Downscaling* (CorrDiff), arXiv:2309.15214.
///
/// With inputs x and targets y, normalised, the denoiser learns the distribution of r = y − R(x) under the conditions x, and a
/// prediction is R(x) + r. R is evaluated without a graph, on the layout of the fields. PhysicsNeMo: `ResidualLoss`.
pub struct Regression<A> {
    network: Network<A>,
    input: Normalizer,
    target: Normalizer,
    conditions: bool,
}

impl<A: Array> Regression<A> {
    /// Wraps a network that maps inputs to targets, normalised by `[input, target]`.
    pub fn new(network: Network<A>, [input, target]: [Normalizer; 2]) -> Self {
        Self { network, input, target, conditions: false }
    }

    /// Gives the denoiser the prediction R(x) too, as channels before those of x (PhysicsNeMo: `hr_mean_conditioning`).
    #[must_use]
    pub fn conditioning(self, conditions: bool) -> Self {
        Self { conditions, ..self }
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
    let pairs = first.mean().iter().zip(second.mean()).zip(first.std().iter().zip(second.std()));
    let near =
        |((m, n), (s, t)): ((&f64, &f64), (&f64, &f64))| (m - n).abs().max((s - t).abs()) <= TOLERANCE * s;
    if first.mean().len() == second.mean().len() && pairs.into_iter().all(near) {
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
