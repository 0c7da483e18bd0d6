//! Training and sampling of denoisers: networks that remove noise, and so draw samples of what they are trained on.

use std::path::PathBuf;

use isobar_array::{Array, Generator};
use isobar_models::{Batch, BatchPart, EdmLoss, EdmSampler, SigmaData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::patches::{Cover, PatchConfig};
use crate::task::Step;

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
    /// Training and sampling on patches of two-dimensional fields; without this table, on the full fields.
    pub patches: Option<PatchConfig>,
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
            patches: None,
        }
    }
}

/// Training of a denoiser, and sampling of predictions with it.
///
/// The inputs of a task are the denoiser's `conditions`, and its targets are what it removes noise from. A prediction is one
/// sample of their distribution, or the mean of several. The noise does not depend on the number of ranks.
#[derive(Debug, Clone)]
pub struct Denoising {
    loss: EdmLoss,
    sampler: EdmSampler,
    members: usize,
    seed: u64,
    patches: Option<PatchConfig>,
}

impl Denoising {
    /// For a denoiser of data with the standard deviation `sigma_data`. `seed` is that of the noise in evaluation.
    ///
    /// # Errors
    ///
    /// Numbers that [`EdmLoss`] or [`EdmSampler`] refuse; patches without points.
    pub fn new(config: &DiffusionConfig, sigma_data: SigmaData, seed: u64) -> isobar_models::Result<Self> {
        let DiffusionConfig { p_mean, p_std, members, sampler, patches, .. } = config.clone();
        let loss = EdmLoss { p_mean, p_std, sigma_data, ..EdmLoss::default() };
        loss.check()?;
        sampler.check()?;
        patches.iter().try_for_each(PatchConfig::check)?;
        Ok(Self { loss, sampler, members: members.max(1), seed, patches })
    }

    /// Returns the step for the network: its samples are patches if it is trained on patches.
    pub(crate) fn step_of_network<'a>(&self, step: Step<'a>) -> Step<'a> {
        let count = self.patches_of_sample();
        Step { offset: step.offset * count, total: step.total * count, ..step }
    }

    /// True if the network of patches gets the full input as further channels.
    pub(crate) fn adds_whole_input(&self) -> bool {
        self.patches.as_ref().is_some_and(|patches| patches.condition_on_input)
    }

    /// Returns the number of patches of a sample in training; 1 without patches.
    fn patches_of_sample(&self) -> i64 {
        self.patches.as_ref().map_or(1, |patches| patches.patch_num as i64)
    }

    /// The random numbers of an evaluation, from the beginning.
    pub(crate) fn generator(&self) -> Generator {
        Generator::new(self.seed)
    }

    /// The loss of a training step: noise of random levels is added to `targets` `[sample, channel, …]`, normalised, and
    /// `network` removes it. They are the samples `part` of the global batch. The first `mean` channels of `conditions` are the
    /// prediction of a regression.
    ///
    /// With patches, these are drawn first, and each patch has its own noise level and noise.
    pub(crate) fn loss<A: Array>(
        &self,
        network: impl FnOnce(Batch<A>) -> Result<A>,
        (conditions, mean): (&Batch<A>, i64),
        targets: &A,
        (generator, part): (&Generator, BatchPart),
    ) -> Result<A> {
        let Some(patches) = &self.patches else {
            return self.loss_of(network, conditions, targets, (generator, part));
        };
        let patching = patches.random(targets, generator)?;
        let conditions = patches.batch(&patching, conditions, patches.whole(conditions, mean)?.as_ref())?;
        let count = self.patches_of_sample();
        let part = BatchPart { offset: part.offset * count, total: part.total * count };
        self.loss_of(network, &conditions, &patching.apply(targets)?, (generator, part))
    }

    fn loss_of<A: Array>(
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
    /// `part` is their part of all samples of an evaluation; `None` means all of them. The first `mean` channels of
    /// `conditions` are the prediction of a regression.
    ///
    /// With patches, the network denoises overlapping patches that cover the grid. The denoised field of a sampler step is their
    /// mean at each point.
    pub(crate) fn sample<A: Array>(
        &self,
        network: impl Fn(Batch<A>) -> Result<A>,
        (conditions, mean): (&Batch<A>, i64),
        channels: usize,
        (generator, part): (&Generator, Option<BatchPart>),
    ) -> Result<A> {
        let given = conditions.require("a denoiser", Batch::<A>::FIELDS)?;
        let one = given.narrow(1, 0, 1)?;
        let like = A::cat(&vec![&one; channels.max(1)], 1)?;
        let cover = self.patches.as_ref().map(|patches| Cover::new(patches, conditions, mean)).transpose()?;
        let denoise = |noisy: &A, sigma: &A| match &cover {
            None => network(noisy_batch(conditions, noisy, sigma)),
            Some(cover) => {
                cover.denoise(noisy, |conditions, noisy| network(noisy_batch(conditions, noisy, sigma)))
            }
        };
        if self.members == 1 {
            return self.draw(&denoise, &like, (generator, part));
        }
        let members = (0..self.members)
            .map(|_| Ok(self.draw(&denoise, &like, (generator, part))?.unsqueeze(1)?))
            .collect::<Result<Vec<A>>>()?;
        Ok(A::cat(&members.iter().collect::<Vec<_>>(), 1)?)
    }

    /// Draws one prediction of the shape of `like` for each sample; another one at every call.
    fn draw<A: Array>(
        &self,
        denoise: &impl Fn(&A, &A) -> Result<A>,
        like: &A,
        (generator, part): (&Generator, Option<BatchPart>),
    ) -> Result<A> {
        let failed = |error: tch::TchError| isobar_models::Error::Denoiser(error.into());
        Ok(self.sampler.sample(like, generator, part, |noisy, sigma| {
            let level = Tensor::f_from_slice(&[sigma]).and_then(|level| level.f_to_kind(noisy.kind()));
            let level = noisy.constant(&level.map_err(failed)?)?;
            denoise(noisy, &level).map_err(isobar_models::Error::Denoiser)
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
