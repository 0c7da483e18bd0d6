//! The denoiser.

use std::fmt;

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
use crate::song_unet::{AUGMENT_LABELS, CLASS_LABELS, NOISE_LABELS};
use crate::song_unet_pos_embd::GLOBAL_INDEX;
use crate::song_unet_pos_lt_embd::LEAD_TIME_LABEL;

/// Names of arrays that networks read beside the input and the noise levels.
const PASSED_ON: [&str; 3] = [AUGMENT_LABELS, GLOBAL_INDEX, LEAD_TIME_LABEL];

/// A denoiser around a [`SongUNet`](crate::SongUNet), or one with positions, PhysicsNeMo's `EDMPrecond`: see [`EdmPreconditioning`]. A
/// condition on the grid is concatenated to the network's input as it is, after c_in · x.
///
/// Arrays of a batch: `fields`, the noisy samples `[batch, img_channels, height, width]`; `sigma`, their noise levels `[batch]` or `[1]`;
/// `conditions` `[batch, channel, height, width]`, the `img_in_channels` beyond those of the samples and those that the network adds,
/// if there are any; with `label_dim`, `class_labels` `[batch, label_dim]`, zeros where not given; `augment_labels`, `global_index` and
/// `lead_time_label`, as the network takes them.
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
pub struct EdmPrecond<A: Array = Tensor> {
    preconditioning: EdmPreconditioning<A>,
    network: Box<dyn Model<A>>,
    labels: i64,
    /// True if the network has channels for a condition.
    conditioned: bool,
}

impl<A: Array> fmt::Debug for EdmPrecond<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EdmPrecond").field("preconditioning", &self.preconditioning).finish_non_exhaustive()
    }
}

/// Input of a denoiser's network: the scaled samples and a condition behind them, the noise levels and class labels, and `others`.
pub(crate) fn network_input<A: Array>(
    x: &A,
    condition: Option<&A>,
    noise: &A,
    class: Option<&A>,
    others: &Batch<A>,
) -> Result<Batch<A>> {
    let input = match condition {
        Some(condition) => A::cat(&[x, condition], 1)?,
        None => x.shallow_clone(),
    };
    let mut batch = Batch::of_fields(input).with(NOISE_LABELS, noise.shallow_clone());
    if let Some(class) = class {
        batch = batch.with(CLASS_LABELS, class.shallow_clone());
    }
    // The condition is no label of the network.
    for name in PASSED_ON {
        if let Some(array) = others.get(name) {
            batch = batch.with(name, array.shallow_clone());
        }
    }
    Ok(batch)
}

impl<A: Array> EdmPrecond<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// Fewer input channels than the samples have; a `sigma_data` that is not finite and above 0; those of
    /// the network.
    pub fn new(config: &EdmPrecondConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        config.check_own()?;
        let preconditioning = EdmPreconditioning::new(&config.sigma_data, params)?;
        let network = config.network.build(&mut params.scope("model"))?;
        let conditioned = config.network.given_channels() > config.img_channels;
        Ok(Self { preconditioning, network, labels: config.network.unet().label_dim as i64, conditioned })
    }

    /// Removes the noise from `x` `[batch, img_channels, height, width]`, whose levels are `sigma` `[batch]` or `[1]`. `others` are the
    /// arrays `conditions`, `class_labels`, `augment_labels`, `global_index` and `lead_time_label`, as far as there are any.
    ///
    /// # Errors
    ///
    /// A condition that is missing, arrays of other shapes, or an operator fails.
    pub fn denoise(&self, x: &A, sigma: &A, others: &Batch<A>, mode: Mode<'_>) -> Result<A> {
        let condition = match self.conditioned {
            true => Some(others.require(MODEL, Batch::<A>::CONDITIONS)?),
            false => None,
        };
        let given = others.get(CLASS_LABELS).filter(|_| self.labels > 0);
        let class = match given {
            Some(class) => Some(class.reshape(&[-1, self.labels])?),
            None if self.labels > 0 => Some(zeros(&[1, self.labels], x)?),
            None => None,
        };
        self.preconditioning.denoise(x, sigma, |x, noise| {
            let batch = network_input(x, condition, noise, class.as_ref(), others)?;
            self.network.forward(&batch, mode)?.require(MODEL, Batch::<A>::FIELDS).map(A::shallow_clone)
        })
    }
}

impl<A: Array> Model<A> for EdmPrecond<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        let sigma = batch.require(MODEL, Batch::<A>::SIGMA)?;
        Ok(Batch::of_fields(self.denoise(x, sigma, batch, mode)?))
    }

    fn regularization(&self) -> Result<Option<A>> {
        self.network.regularization()
    }
}
