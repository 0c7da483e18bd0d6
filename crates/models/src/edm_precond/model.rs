//! The denoiser.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::{EdmPrecondConfig, MODEL};
use crate::batch::Batch;
use crate::diffusion::EdmPreconditioning;
use crate::error::Result;
use crate::layers::zeros;
use crate::model::Model;
use crate::song_unet::SongUNet;

/// A denoiser around a [`SongUNet`], PhysicsNeMo's `EDMPrecond`: see [`EdmPreconditioning`]. A condition on the grid is concatenated to
/// the network's input as it is, after c_in · x.
///
/// Arrays of a batch: `fields`, the noisy samples `[batch, img_channels, height, width]`; `sigma`, their noise levels `[batch]` or `[1]`;
/// `conditions` `[batch, img_in_channels − img_channels, height, width]` if there are such channels; with `label_dim`, `class_labels`
/// `[batch, label_dim]`, zeros where not given; `augment_labels`.
///
/// State dict: the buffer `sigma_data` `[]` or `[channel]`; the network's under `model`.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::{Batch, EdmPrecond, EdmPrecondConfig, Mode, SongUNetConfig};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// // Samples of one channel, conditions of two.
/// let network = SongUNetConfig { model_channels: 4, channel_mult: vec![1, 2], num_blocks: 1, ..SongUNetConfig::new([8, 8], 3, 1) };
/// let model = EdmPrecond::new(&EdmPrecondConfig::new(1, network), &mut ParamStore::new(Generator::new(1)))?;
/// let ones = |channels| Tensor::ones([2, channels, 8, 8], (Kind::Float, Device::Cpu));
/// let others = Batch::default().with("conditions", ones(2));
/// let y = model.denoise(&ones(1), &Tensor::from_slice(&[0.5f32]), &others, Mode::Eval)?;
/// assert_eq!(y.size(), [2, 1, 8, 8]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct EdmPrecond<A = Tensor> {
    preconditioning: EdmPreconditioning<A>,
    network: SongUNet<A>,
    labels: i64,
    /// True if the network has channels for a condition.
    conditioned: bool,
}

impl<A: Array> EdmPrecond<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Fewer input channels than the samples have; a `sigma_data` that is not finite and above 0; those of
    /// [`SongUNet::new`](crate::SongUNet::new).
    pub fn new(config: &EdmPrecondConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        config.check_own()?;
        let preconditioning = EdmPreconditioning::new(&config.sigma_data, params)?;
        let network = SongUNet::new(&config.network, &mut params.scope("model"))?;
        let conditioned = config.network.in_channels > config.img_channels;
        Ok(Self { preconditioning, network, labels: config.network.label_dim as i64, conditioned })
    }

    /// Removes the noise from `x` `[batch, img_channels, height, width]`, whose levels are `sigma` `[batch]` or `[1]`. `others` are the
    /// arrays `conditions`, `class_labels` and `augment_labels`, as far as there are any.
    ///
    /// # Errors
    ///
    /// A condition that is missing, arrays of other shapes, or an operator fails.
    pub fn denoise(&self, x: &A, sigma: &A, others: &Batch<A>, mode: Mode<'_>) -> Result<A> {
        let condition = match self.conditioned {
            true => Some(others.require(MODEL, Batch::<A>::CONDITIONS)?),
            false => None,
        };
        let given = others.get("class_labels").filter(|_| self.labels > 0);
        let class = match given {
            Some(class) => Some(class.reshape(&[-1, self.labels])?),
            None if self.labels > 0 => Some(zeros(&[1, self.labels], x)?),
            None => None,
        };
        self.preconditioning.denoise(x, sigma, |x, noise| {
            let input = match condition {
                Some(condition) => A::cat(&[x, condition], 1)?,
                None => x.shallow_clone(),
            };
            self.network.forward(&input, Some(noise), class.as_ref(), others.get("augment_labels"), mode)
        })
    }
}

impl<A: Array> Model<A> for EdmPrecond<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let sigma = batch.require(MODEL, Batch::<A>::SIGMA)?;
        Ok(Batch::of_fields(self.denoise(x, sigma, batch, mode)?))
    }
}
