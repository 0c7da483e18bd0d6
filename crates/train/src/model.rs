//! `[model]`: which network, and with which sizes.

use isobar_models::{
    Afno, AfnoConfig, DistributedAfno, DistributedAfnoConfig, Fno, FnoConfig, FullyConnected,
    FullyConnectedConfig, Mode, UNet, UNetConfig,
};
use isobar_shard::ParamStore;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::task::{BoxError, Step};

/// The network of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ModelConfig {
    /// Adaptive Fourier neural operator, whole on every rank.
    Afno(AfnoConfig),
    /// Adaptive Fourier neural operator with its channels over the model-parallel group.
    DistributedAfno(DistributedAfnoConfig),
    /// Fourier neural operator, whole on every rank.
    Fno(FnoConfig),
    /// U-Net, whole on every rank.
    #[serde(rename = "unet")]
    UNet(UNetConfig),
    /// Linear layers at every point of the field, its channels being the features.
    FullyConnected(FullyConnectedConfig),
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self::Afno(AfnoConfig {
            patch_size: [4, 4],
            embed_dim: 128,
            depth: 4,
            ..AfnoConfig::new([64, 64], 1, 1)
        })
    }
}

impl ModelConfig {
    /// Makes the network; its parameters go into `params`, whose region is the model-parallel group. All ranks of the
    /// region call.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit together, or a parameter that can't be made.
    pub fn build(&self, params: &mut ParamStore) -> Result<Network, isobar_models::Error> {
        Ok(match self {
            Self::Afno(config) => Network::Afno(Afno::new(config, params)?),
            Self::DistributedAfno(config) => Network::DistributedAfno(DistributedAfno::new(config, params)?),
            Self::Fno(config) => Network::Fno(Fno::new(config, params)?),
            Self::UNet(config) => Network::UNet(UNet::new(config, params)?),
            Self::FullyConnected(config) => Network::FullyConnected(FullyConnected::new(config, params)?),
        })
    }
}

/// A network of a [`ModelConfig`].
pub enum Network {
    /// See [`Afno`].
    Afno(Afno<Tensor>),
    /// See [`DistributedAfno`].
    DistributedAfno(DistributedAfno<Tensor>),
    /// See [`Fno`].
    Fno(Fno<Tensor>),
    /// See [`UNet`].
    UNet(UNet<Tensor>),
    /// See [`FullyConnected`].
    FullyConnected(FullyConnected<Tensor>),
}

impl Network {
    /// Fields `[sample, channel, x, y]` to fields; `step` while training, `None` for evaluation.
    ///
    /// # Errors
    ///
    /// An input of another shape than the configuration says.
    pub fn forward(&self, x: &Tensor, step: Option<Step<'_>>) -> Result<Tensor, BoxError> {
        let mode = step.map_or(Mode::Eval, |step| Mode::train_part(step.generator, step.offset, step.total));
        Ok(match self {
            Self::Afno(model) => model.forward(x, mode)?,
            Self::DistributedAfno(model) => model.forward(x, mode)?,
            Self::Fno(model) => model.forward(x)?,
            Self::UNet(model) => model.forward(x, mode)?,
            Self::FullyConnected(model) => model.forward(&x.f_movedim_int(1, -1)?)?.f_movedim_int(-1, 1)?,
        })
    }
}
