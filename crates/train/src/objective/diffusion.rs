//! Diffusion: training of a denoiser, and sampling of predictions from it.

use std::path::PathBuf;

use isobar_array::{Array, Generator};
use isobar_models::{Batch, BatchPart, Denoiser, EdmLoss, EdmSampler, FieldSpec, LossReduction, SigmaData};
use isobar_registry::Registered;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::patches::{Cover, PatchConfig};
use super::{FirstStage, Inputs, Objective, ObjectiveArray, Setup, Target, Training, settings};
use crate::loss::{LossArray, Weighting};
use crate::task::BoxError;

/// Settings of a denoiser such as `edm_preconditioner`: noise levels in training, and the sampler in validation and prediction. See
/// [`EdmLoss`] and [`EdmSampler`].
///
/// The inputs are the denoiser's `conditions`; noise is added to the targets. A prediction is one sample of their distribution, or
/// the mean of several. The noise does not depend on the number of ranks.
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
    /// Folder of a trained run whose network predicts the mean of the targets, as in CorrDiff. The denoiser is trained on the
    /// residual of that prediction and samples it. The run must use the same data; its network is frozen.
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

impl Registered for DiffusionConfig {
    const NAME: &'static str = "diffusion";
    const SUMMARY: &'static str =
        "A denoiser, such as `edm_preconditioner`, removes noise from the targets; predictions are samples.";
}

impl Objective for DiffusionConfig {
    fn loss<A: ObjectiveArray>(&self, training: &Training<'_, A>) -> Result<A, BoxError> {
        let [Target { fields, weights }] = training.targets() else {
            return Err(format!(
                "a denoiser is trained on single steps, not on {}; --set data.train_steps=1",
                training.targets().len()
            )
            .into());
        };
        let mut inputs = training.inputs()?;
        let denoising = self.denoising(&inputs)?;
        let mean = inputs.call_first_stage()?;
        let output = training.output_for(fields)?;
        let clean = match mean {
            Some(mean) => output.sub(&mean)?,
            None => output,
        };
        denoising.loss(&inputs, &clean, weights)
    }

    fn predict<A: ObjectiveArray>(&self, mut inputs: Inputs<'_, A>) -> Result<A, BoxError> {
        let denoising = self.denoising(&inputs)?;
        let mean = inputs.call_first_stage()?;
        let drawn = denoising.sample(&inputs)?;
        Ok(match mean {
            Some(mean) if mean.shape().len() < drawn.shape().len() => drawn.add(&mean.unsqueeze(1)?)?,
            Some(mean) => drawn.add(&mean)?,
            None => drawn,
        })
    }

    fn check(&self, setup: &Setup) -> Result<(), BoxError> {
        let Some(denoiser) = setup.denoiser.clone() else {
            return Err(not_a_denoiser(&format!("model.type = {:?}", setup.model)));
        };
        if setup.train_steps != 1 {
            return Err(format!(
                "data.train_steps is {}, but a denoiser is trained on single steps; --set data.train_steps=1",
                setup.train_steps
            )
            .into());
        }
        if self.members > 1 && (setup.changes || setup.validation_steps > 1) {
            return Err(format!(
                "task.members is {}, but data.predict is \"change\" or data.validation_steps above 1; ensembles are of one step and \
                 predict frames; --set task.members=1",
                self.members
            )
            .into());
        }
        if self.regression.as_ref().is_some_and(|folder| folder.as_os_str().is_empty()) {
            return Err("task.regression is \"\", expected the folder of a trained run; --set task.regression=runs/NAME".into());
        }
        if self.condition_on_mean && self.regression.is_none() {
            return Err("task.condition_on_mean is on, but there is no task.regression that predicts the mean; name the folder of a \
                        trained run: --set task.regression=runs/…"
                .into());
        }
        self.check_numbers(&denoiser)
    }

    fn check_fields(&self, fields: &FieldSpec, has_conditions: bool) -> Result<(), BoxError> {
        if let Some(targets) = &fields.target_extents {
            return Err(format!(
                "task.type = \"diffusion\" needs inputs and targets on one grid, but the inputs have {:?} points and the targets \
                 {targets:?}; interpolate the inputs to the targets' grid (`isobar data coarsen` writes such pairs), and remove \
                 [data.target]",
                fields.extents
            )
            .into());
        }
        let Some(patches) = &self.patches else { return Ok(()) };
        patches.check_extents(&fields.extents)?;
        match patches.condition_on_input && has_conditions {
            false => Ok(()),
            true => Err(format!("data.scalars_as is \"conditions\", but {WHOLE_INPUT}").into()),
        }
    }

    /// A denoiser gets the targets with noise, and the inputs as conditions; on patches, it may also get the full input. Unless it
    /// reads the positions of patches, it is built for the extents of a patch.
    fn fields_of_network(&self, fields: FieldSpec, reads_patches: bool) -> FieldSpec {
        let inputs = fields.in_channels + fields.position_channels;
        let whole_channels =
            if self.patches.as_ref().is_some_and(|patches| patches.condition_on_input) { inputs } else { 0 };
        let patch = self.patches.as_ref().map(|patches| patches.patch_shape.to_vec());
        let (extents, patch_extents) = match patch {
            Some(patch) if !reads_patches => (patch, None),
            patch => (fields.extents.clone(), patch),
        };
        let mean = self.regression.is_some() && self.condition_on_mean;
        let mean_channels = if mean { fields.out_channels } else { 0 };
        let arrays = [Batch::<()>::SIGMA, Batch::<()>::CONDITIONS].map(str::to_owned);
        FieldSpec {
            extents,
            patch_extents,
            condition_channels: mean_channels + inputs + whole_channels,
            in_channels: fields.out_channels,
            position_channels: 0,
            arrays: fields.arrays.iter().cloned().chain(arrays).collect(),
            ..fields
        }
    }

    fn samples_of_network(&self) -> usize {
        self.patches.as_ref().map_or(1, |patches| patches.patch_num)
    }

    fn members(&self) -> usize {
        self.members
    }

    fn first_stage(&self) -> Option<FirstStage> {
        let folder = self.regression.clone()?;
        Some(FirstStage { key: "regression", folder, is_input: self.condition_on_mean })
    }
}

crate::register_task!(DiffusionConfig);

/// Error text if conditions of samples are combined with the full input.
const WHOLE_INPUT: &str = "task.patches.condition_on_input does not support conditions of samples; --set \
                           task.patches.condition_on_input=false";

fn not_a_denoiser(network: &str) -> BoxError {
    format!(
        "task.type = \"diffusion\" requires a denoiser, but {network} is not one; --set task.type=regression, or wrap the model: \
         model.type = \"edm_preconditioner\" with the current [model] table as [model.model]"
    )
    .into()
}

impl DiffusionConfig {
    /// Training and sampling of the network of a step.
    fn denoising<A: Array>(&self, inputs: &Inputs<'_, A>) -> Result<Denoising, BoxError> {
        let denoiser = inputs.denoiser().ok_or_else(|| not_a_denoiser("the network"))?;
        if inputs.has_conditions() && self.patches.as_ref().is_some_and(|patches| patches.condition_on_input)
        {
            return Err(WHOLE_INPUT.into());
        }
        Denoising::new(self, denoiser)
    }

    fn loss_with(&self, sigma_data: SigmaData) -> EdmLoss {
        EdmLoss { p_mean: self.p_mean, p_std: self.p_std, sigma_data, ..EdmLoss::default() }
    }

    /// Checks the numbers that depend on no fields.
    fn check_numbers(&self, denoiser: &Denoiser) -> Result<(), BoxError> {
        let defaults = Self::default();
        settings("task", &defaults, self.loss_with(denoiser.sigma_data.clone()).check())?;
        settings("task.sampler", &defaults.sampler, self.sampler.clone().within(denoiser).check())?;
        self.patches.iter().try_for_each(PatchConfig::check)
    }
}

/// Training of a denoiser, and sampling of predictions with it.
struct Denoising {
    loss: EdmLoss,
    sampler: EdmSampler,
    members: usize,
    patches: Option<PatchConfig>,
}

impl Denoising {
    fn new(config: &DiffusionConfig, denoiser: Denoiser) -> Result<Self, BoxError> {
        config.check_numbers(&denoiser)?;
        let DiffusionConfig { members, sampler, patches, .. } = config.clone();
        let sampler = sampler.within(&denoiser);
        let loss = config.loss_with(denoiser.sigma_data);
        Ok(Self { loss, sampler, members: members.max(1), patches })
    }

    /// Returns the number of patches of a sample in training; 1 without patches.
    fn patches_of_sample(&self) -> usize {
        self.patches.as_ref().map_or(1, |patches| patches.patch_num)
    }

    /// Computes the loss of a training step: adds noise of random levels to the normalised `clean` `[sample, channel, …]`, and
    /// compares the denoised fields with `clean`, with the weights of channels and points. Masked points are excluded.
    ///
    /// With patches, these are drawn first, and each patch has its own noise level and noise.
    fn loss<A: LossArray>(
        &self,
        inputs: &Inputs<'_, A>,
        clean: &A,
        weights: &Weighting<A>,
    ) -> Result<A, BoxError> {
        let Some(patches) = &self.patches else {
            return self.loss_of(inputs, inputs.batch(), clean, weights);
        };
        let patching = patches.random(clean, inputs.generator())?;
        let whole = patches.whole(inputs.batch(), inputs.mean_channels())?;
        let conditions = patches.batch(&patching, inputs.batch(), whole.as_ref())?;
        let points_of_samples = clean.narrow(1, 0, 1)?.mul_scalar(0.0)?;
        let cut = |points: &A| -> Result<A, BoxError> {
            let whole = points.to_kind(clean.kind())?.add(&points_of_samples)?;
            Ok(patching.apply(&whole)?.to_kind(points.kind())?)
        };
        let weights = weights.map_points(cut)?;
        self.loss_of(inputs, &conditions, &patching.apply(clean)?, &weights)
    }

    fn loss_of<A: LossArray>(
        &self,
        inputs: &Inputs<'_, A>,
        conditions: &Batch<A>,
        clean: &A,
        weights: &Weighting<A>,
    ) -> Result<A, BoxError> {
        let patches = self.patches_of_sample();
        let count = patches as i64;
        let part = inputs.part();
        let part = part.map(|part| BatchPart { offset: part.offset * count, total: part.total * count });
        let draw = |loss: &EdmLoss| {
            loss.draw(clean, inputs.generator(), part, |noisy, sigma| {
                let noisy = noisy_batch(conditions, noisy, sigma);
                inputs.forward(noisy, patches).map_err(isobar_models::Error::Denoiser)
            })
        };
        match weights.is_uniform() {
            true => Ok(draw(&self.loss)?),
            false => {
                let of_points = EdmLoss { reduction: LossReduction::None, ..self.loss.clone() };
                Ok(weights.mean(&draw(&of_points)?)?)
            }
        }
    }

    /// Draws predictions: `[sample, channel, …]`, or with several members `[sample, member, channel, …]`.
    ///
    /// With patches, the network denoises overlapping patches that cover the grid. The denoised field of a sampler step is their
    /// mean at each point.
    fn sample<A: Array>(&self, inputs: &Inputs<'_, A>) -> Result<A, BoxError> {
        let conditions = inputs.batch();
        let given = conditions.require("a denoiser", Batch::<A>::FIELDS)?;
        let one = given.narrow(1, 0, 1)?;
        let like = A::cat(&vec![&one; inputs.outputs().max(1)], 1)?;
        let cover = |patches| Cover::new(patches, conditions, inputs.mean_channels());
        let cover = self.patches.as_ref().map(cover).transpose()?;
        let network = |batch| inputs.forward(batch, 1);
        let denoise = |noisy: &A, sigma: &A| match &cover {
            None => network(noisy_batch(conditions, noisy, sigma)),
            Some(cover) => {
                cover.denoise(noisy, |conditions, noisy| network(noisy_batch(conditions, noisy, sigma)))
            }
        };
        let draws = (inputs.generator(), inputs.part());
        if self.members == 1 {
            return self.draw(&denoise, &like, draws);
        }
        let members = (0..self.members)
            .map(|_| Ok(self.draw(&denoise, &like, draws)?.unsqueeze(1)?))
            .collect::<Result<Vec<A>, BoxError>>()?;
        Ok(A::cat(&members.iter().collect::<Vec<_>>(), 1)?)
    }

    /// Draws one prediction of the shape of `like` for each sample; another one at every call.
    fn draw<A: Array>(
        &self,
        denoise: &impl Fn(&A, &A) -> Result<A, BoxError>,
        like: &A,
        (generator, part): (&Generator, Option<BatchPart>),
    ) -> Result<A, BoxError> {
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
