//! Training and sampling of denoisers: networks that remove noise, and so draw samples of what they are trained on.

use std::path::PathBuf;

use isobar_array::{Array, Generator};
use isobar_models::{Batch, BatchPart, EdmLoss, EdmSampler, SigmaData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

/// Result whose error the engine passes on.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// `[diffusion]`: noise levels of training, and the sampler of validation and prediction. See [`EdmLoss`] and [`EdmSampler`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DiffusionConfig {
    /// Mean of the logarithm of the noise levels in training.
    pub p_mean: f64,
    /// Standard deviation of the logarithm of the noise levels in training.
    pub p_std: f64,
    /// Number of samples drawn for each input in validation and `isobar predict`. Above 1, the prediction is the ensemble mean, and
    /// metrics such as `crps` and `spread_skill` use all members. Trajectories need `data.predict = "frame"` and
    /// `data.validation_steps = 1`.
    #[schemars(range(min = 1))]
    pub members: usize,
    /// Folder of a trained run whose network predicts the mean of the targets, as in CorrDiff: the denoiser learns and draws what that
    /// prediction lacks. The run has the same data, and its network stays as it is.
    pub regression: Option<PathBuf>,
    /// With `regression`: the denoiser is also given its prediction, as condition channels before the inputs.
    pub condition_on_mean: bool,
    /// The sampler: from noise to a prediction, in validation and `isobar predict`.
    pub sampler: EdmSampler,
}

impl Default for DiffusionConfig {
    fn default() -> Self {
        let loss = EdmLoss::default();
        Self {
            p_mean: loss.p_mean,
            p_std: loss.p_std,
            members: 1,
            regression: None,
            condition_on_mean: false,
            sampler: EdmSampler::default(),
        }
    }
}

/// How a denoiser is trained, and how predictions are drawn with it.
///
/// The inputs of a task are the denoiser's `conditions`, and its targets are what it removes noise from. A prediction is one
/// sample of their distribution, or the mean of several. The noise does not depend on the number of ranks.
#[derive(Debug, Clone)]
pub struct Denoising {
    loss: EdmLoss,
    sampler: EdmSampler,
    members: usize,
    seed: u64,
}

impl Denoising {
    /// For a denoiser of data with the standard deviation `sigma_data`. `seed` is that of the noise in evaluation.
    ///
    /// # Errors
    ///
    /// Numbers that [`EdmLoss`] or [`EdmSampler`] refuse.
    pub fn new(config: &DiffusionConfig, sigma_data: SigmaData, seed: u64) -> isobar_models::Result<Self> {
        let DiffusionConfig { p_mean, p_std, members, sampler, .. } = config.clone();
        let loss = EdmLoss { p_mean, p_std, sigma_data, ..EdmLoss::default() };
        loss.check()?;
        sampler.check()?;
        Ok(Self { loss, sampler, members: members.max(1), seed })
    }

    /// The random numbers of an evaluation, from the beginning.
    pub(crate) fn generator(&self) -> Generator {
        Generator::new(self.seed)
    }

    /// The loss of a training step: noise of random levels is added to `targets` `[sample, channel, …]`, normalised, and
    /// `network` removes it. They are the samples `part` of the global batch.
    pub(crate) fn loss<A: Array>(
        &self,
        network: impl FnOnce(Batch<A>) -> Result<A>,
        conditions: &Batch<A>,
        targets: &A,
        (generator, part): (&Generator, BatchPart),
    ) -> Result<A> {
        Ok(self.loss.draw(targets, generator, Some(part), |noisy, sigma| {
            network(noisy_batch(conditions, noisy, sigma)).map_err(isobar_models::Error::Denoiser)
        })?)
    }

    /// Draws predictions with `channels` channels: `[sample, channel, …]`, or with several members `[sample, member, channel, …]`.
    /// `part` says which of all samples of an evaluation they are; `None` means that they are all.
    pub(crate) fn sample<A: Array>(
        &self,
        network: impl Fn(Batch<A>) -> Result<A>,
        conditions: &Batch<A>,
        channels: usize,
        (generator, part): (&Generator, Option<BatchPart>),
    ) -> Result<A> {
        let given = conditions.require("a denoiser", Batch::<A>::FIELDS)?;
        let one = given.narrow(1, 0, 1)?;
        let like = A::cat(&vec![&one; channels.max(1)], 1)?;
        if self.members == 1 {
            return self.draw(&network, conditions, &like, (generator, part));
        }
        let members = (0..self.members)
            .map(|_| Ok(self.draw(&network, conditions, &like, (generator, part))?.unsqueeze(1)?))
            .collect::<Result<Vec<A>>>()?;
        Ok(A::cat(&members.iter().collect::<Vec<_>>(), 1)?)
    }

    /// Draws one prediction of the shape of `like` for each sample; another one at every call.
    fn draw<A: Array>(
        &self,
        network: &impl Fn(Batch<A>) -> Result<A>,
        conditions: &Batch<A>,
        like: &A,
        (generator, part): (&Generator, Option<BatchPart>),
    ) -> Result<A> {
        let failed = |error: tch::TchError| isobar_models::Error::Denoiser(error.into());
        Ok(self.sampler.sample(like, generator, part, |noisy, sigma| {
            let level = Tensor::f_from_slice(&[sigma]).and_then(|level| level.f_to_kind(noisy.kind()));
            let level = noisy.constant(&level.map_err(failed)?)?;
            network(noisy_batch(conditions, noisy, &level)).map_err(isobar_models::Error::Denoiser)
        })?)
    }
}

/// A batch for a denoiser: the noisy samples, their noise levels, and the inputs of the task as conditions.
fn noisy_batch<A: Array>(inputs: &Batch<A>, noisy: &A, sigma: &A) -> Batch<A> {
    let given = inputs.names().filter_map(|name| inputs.get(name).map(|array| (name, array)));
    given
        .map(|(name, array)| match name {
            _ if name == Batch::<A>::FIELDS => (Batch::<A>::CONDITIONS, array),
            _ => (name, array),
        })
        .fold(Batch::of_fields(noisy.shallow_clone()), |batch, (name, array)| {
            batch.with(name, array.shallow_clone())
        })
        .with(Batch::<A>::SIGMA, sigma.shallow_clone())
}
