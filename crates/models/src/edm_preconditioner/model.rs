//! The denoiser.

use std::fmt;

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::{EdmPreconditionerConfig, MODEL};
use crate::batch::Batch;
use crate::diffusion::EdmPreconditioning;
use crate::error::{Error, Result};
use crate::model::{Model, ModelArray};

/// A denoiser D around any network F, PhysicsNeMo's `EDMPreconditioner`: see [`EdmPreconditioning`].
///
/// Arrays of a batch: `fields`, the noisy samples `[batch, channel, …]`; `sigma`, their noise levels `[batch]` or `[1]`. The network is
/// given c_in · `fields`; ln σ / 4 as `time` `[batch, 1]`; and all other arrays as they are, such as
/// `conditions` `[batch, feature]`. Conditions that are fields, `[batch, channel, …]`, are concatenated to its input, after
/// c_in · `fields` and unscaled, as [`EdmPrecond`](crate::EdmPrecond) does.
///
/// State dict: the buffer `sigma_data` `[]` or `[channel]`; the network's under `model`.
///
/// ```
/// use isobar_array::{Generator, Convert};
/// use isobar_models::{Batch, EdmLoss, EdmPreconditioner, EdmPreconditionerConfig, EdmSampler, Mode, Model, ModelConfig, SongUNetConfig};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let network = SongUNetConfig { model_channels: 4, channel_mult: vec![1, 2], num_blocks: 1, ..SongUNetConfig::new([8, 8], 1, 1) };
/// let config = EdmPreconditionerConfig::new(ModelConfig::new(network));
/// let denoiser = EdmPreconditioner::new(&config, &mut ParamStore::new(Generator::new(1)))?;
///
/// // A step of training: noise of random levels is added to the samples, and the denoiser removes it.
/// let samples = Tensor::ones([2, 1, 8, 8], (Kind::Float, Device::Cpu));
/// let generator = Generator::new(2);
/// let loss = EdmLoss::default().draw(&samples, &generator, None, |noisy, sigma| {
///     denoiser.denoise(noisy, sigma, &Batch::default(), Mode::train(&generator))
/// })?;
/// loss.backward();
///
/// // Sampling.
/// let sampler = EdmSampler { num_steps: 3, ..EdmSampler::default() };
/// let sample = sampler.sample(&samples, &Generator::new(3), None, |x, sigma| {
///     denoiser.denoise(x, &Tensor::from_slice(&[sigma as f32]), &Batch::default(), Mode::Eval)
/// })?;
/// assert_eq!(sample.size(), [2, 1, 8, 8]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
pub struct EdmPreconditioner<A: Array = Tensor> {
    preconditioning: EdmPreconditioning<A>,
    network: Box<dyn Model<A>>,
}

impl<A: Array> fmt::Debug for EdmPreconditioner<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EdmPreconditioner")
            .field("preconditioning", &self.preconditioning)
            .finish_non_exhaustive()
    }
}

impl<A: ModelArray> EdmPreconditioner<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A `sigma_data` that is not finite and above 0; those of the network; or `params` refuses a parameter.
    pub fn new(config: &EdmPreconditionerConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let preconditioning = EdmPreconditioning::new(&config.sigma_data, params)?;
        let network = config.model.0.build(&mut params.scope("model"))?;
        Ok(Self { preconditioning, network })
    }
}

impl<A: Array> EdmPreconditioner<A> {
    /// Removes the noise from `x` `[batch, channel, …]`, whose levels are `sigma` `[batch]` or `[1]`. `others` are further arrays that
    /// the network reads.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes, or the network or an operator fails.
    pub fn denoise(&self, x: &A, sigma: &A, others: &Batch<A>, mode: Mode<'_>) -> Result<A> {
        self.preconditioning.denoise(x, sigma, |x, noise| {
            let time = noise.reshape(&[noise.extent(0)?, 1])?;
            let on_grid = |name: &str, array: &A| {
                name == Batch::<A>::CONDITIONS && array.shape().len() == x.shape().len()
            };
            let given = || others.names().filter_map(|name| others.get(name).map(|array| (name, array)));
            let fields: Vec<&A> = [x]
                .into_iter()
                .chain(given().filter(|(name, array)| on_grid(name, array)).map(|(_, array)| array))
                .collect();
            let input = match fields[..] {
                [only] => only.shallow_clone(),
                _ => A::cat(&fields, 1)?,
            };
            let batch = given()
                .filter(|(name, array)| !on_grid(name, array))
                .fold(Batch::default(), |batch, (name, array)| batch.with(name, array.shallow_clone()))
                .with(Batch::<A>::FIELDS, input);
            // Without fields as conditions, the network receives the class labels as `conditions`.
            let labels =
                others.get(Batch::<A>::CLASS_LABELS).filter(|_| batch.get(Batch::<A>::CONDITIONS).is_none());
            let batch = labels
                .into_iter()
                .fold(batch, |batch, labels| batch.with(Batch::<A>::CONDITIONS, labels.shallow_clone()))
                .with(Batch::<A>::TIME, time);
            let mut output = self.network.forward(&batch, mode)?;
            output.take(Batch::<A>::FIELDS).ok_or_else(|| Error::Missing {
                model: MODEL,
                name: Batch::<A>::FIELDS.to_owned(),
                given: output.names().map(str::to_owned).collect(),
            })
        })
    }
}

impl<A: Array> Model<A> for EdmPreconditioner<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let sigma = batch.require(MODEL, Batch::<A>::SIGMA)?;
        Ok(Batch::of_fields(self.denoise(x, sigma, batch, mode)?))
    }

    fn regularization(&self) -> Result<Option<A>> {
        self.network.regularization()
    }
}
