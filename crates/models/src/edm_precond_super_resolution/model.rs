//! The denoiser.

use std::fmt;

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::{EdmPrecondSuperResolutionConfig, MODEL};
use crate::batch::Batch;
use crate::diffusion::{EdmPreconditioning, SigmaData};
use crate::edm_precond::network_input;
use crate::error::Result;
use crate::model::Model;

/// Name of the condition in PhysicsNeMo.
const IMG_LR: &str = "img_lr";

/// A denoiser that refines coarse fields, PhysicsNeMo's `EDMPrecondSuperResolution`: [`EdmPrecond`](crate::EdmPrecond) without
/// class labels, whose condition, the coarse fields on the fine grid, is always there. Mardani et al., arXiv:2309.15214 (CorrDiff), add
/// its samples to a regression.
///
/// Arrays of a batch: `fields`, the noisy samples `[batch, img_out_channels, height, width]`; `sigma`, their noise levels `[batch]` or
/// `[1]`; `conditions`, or in its place `img_lr`, `[batch, channel, height, width]` with the `img_in_channels` that the network does not
/// add itself; `augment_labels`, `global_index` and `lead_time_label`, as the network takes them.
///
/// State dict: the network's under `model`. `sigma_data` is an argument only.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_models::{Batch, EdmPrecondSuperResolution, EdmPrecondSuperResolutionConfig, Mode, SongUNetConfig};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// // Samples of one channel, coarse fields of two.
/// let network = SongUNetConfig { model_channels: 4, channel_mult: vec![1, 2], num_blocks: 1, ..SongUNetConfig::new([8, 8], 3, 1) };
/// let config = EdmPrecondSuperResolutionConfig::new(network);
/// let model = EdmPrecondSuperResolution::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let ones = |channels| Tensor::ones([2, channels, 8, 8], (Kind::Float, Device::Cpu));
/// let sigma = Tensor::from_slice(&[0.5f32]);
/// let y = model.denoise(&ones(1), &ones(2), &sigma, &Batch::default(), Mode::Eval)?;
/// assert_eq!(y.size(), [2, 1, 8, 8]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
pub struct EdmPrecondSuperResolution<A: Array = Tensor> {
    sigma_data: SigmaData,
    network: Box<dyn Model<A>>,
}

impl<A: Array> fmt::Debug for EdmPrecondSuperResolution<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EdmPrecondSuperResolution")
            .field("sigma_data", &self.sigma_data)
            .finish_non_exhaustive()
    }
}

impl<A: Array> EdmPrecondSuperResolution<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// No channel for a condition; class labels; a `sigma_data` that is not finite and above 0; those of the network.
    pub fn new(
        config: &EdmPrecondSuperResolutionConfig,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        config.check_own()?;
        let network = config.network.build(&mut params.scope("model"))?;
        Ok(Self { sigma_data: SigmaData::All(config.sigma_data), network })
    }

    /// Removes the noise from `x` `[batch, img_out_channels, height, width]`, whose levels are `sigma` `[batch]` or `[1]`, given coarse
    /// fields `img_lr` on the same grid. `others` are the arrays `augment_labels`, `global_index` and `lead_time_label`, as far as there are
    /// any.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes, or an operator fails.
    pub fn denoise(&self, x: &A, img_lr: &A, sigma: &A, others: &Batch<A>, mode: Mode<'_>) -> Result<A> {
        EdmPreconditioning::without_buffer(&self.sigma_data, x)?.denoise(x, sigma, |x, noise| {
            let batch = network_input(x, Some(img_lr), noise, None, others)?;
            self.network.forward(&batch, mode)?.require(MODEL, Batch::<A>::FIELDS).map(A::shallow_clone)
        })
    }
}

impl<A: Array> Model<A> for EdmPrecondSuperResolution<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let sigma = batch.require(MODEL, Batch::<A>::SIGMA)?;
        let img_lr = match batch.get(IMG_LR) {
            Some(img_lr) => img_lr,
            None => batch.require(MODEL, Batch::<A>::CONDITIONS)?,
        };
        Ok(Batch::of_fields(self.denoise(x, img_lr, sigma, batch, mode)?))
    }

    fn regularization(&self) -> Result<Option<A>> {
        self.network.regularization()
    }
}
