//! `[model]`: which network, and with which sizes.

use isobar_models::{
    Afno, AfnoConfig, CountParams, DistributedAfno, DistributedAfnoConfig, Fno, FnoConfig, FullyConnected,
    FullyConnectedConfig, Mode, UNet, UNetConfig,
};
use isobar_shard::{Array, ModelSize, ParamCount, Params};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::fields::{DOMAIN_AXES, idle};
use crate::task::{BoxError, Step};

/// The network of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ModelConfig {
    /// Adaptive Fourier neural operator.
    Afno(AfnoConfig),
    /// Adaptive Fourier neural operator with its channels over the model-parallel group.
    DistributedAfno(DistributedAfnoConfig),
    /// Fourier neural operator.
    Fno(FnoConfig),
    /// U-Net.
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
    /// Checks that the network accepts fields of these spatial extents, without building it.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit each other or the fields, with a setting that fits.
    pub fn check_extents(&self, extents: &[usize]) -> Result<(), isobar_models::Error> {
        match self {
            Self::Fno(config) => config.check_extents(extents),
            Self::UNet(config) => config.check_extents(extents),
            // These name their extents, or take any.
            Self::Afno(_) | Self::DistributedAfno(_) | Self::FullyConnected(_) => Ok(()),
        }
    }

    /// Warnings about ranks of an axis without tokens of the network, for fields sharded along the first dims
    /// over these numbers of ranks.
    pub fn idle_ranks(&self, axes: &[(&str, usize)]) -> Vec<String> {
        let tokens = match self {
            Self::Afno(config) => [0, 1].map(|dim| config.inp_shape[dim] / config.patch_size[dim].max(1)),
            Self::DistributedAfno(config) => config.inp_shape.map(|extent| extent / config.patch_size.max(1)),
            Self::Fno(_) | Self::UNet(_) | Self::FullyConnected(_) => return Vec::new(),
        };
        let along = axes.iter().filter_map(|(name, ranks)| {
            let dim = DOMAIN_AXES.iter().position(|axis| axis == name)?;
            idle(name, *ranks, dim, *tokens.get(dim)? as i64, "tokens")
        });
        along.collect()
    }

    /// Makes the network; its parameters come from `params`: a [`ParamStore`](isobar_shard::ParamStore), whose region is the
    /// model-parallel group, or [`MeshParams`](isobar_shard::MeshParams) for a network over sharded fields. All ranks call.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit together, or a parameter that can't be made.
    pub fn build<P: Params>(&self, params: &mut P) -> Result<Network<P::Array>, isobar_models::Error> {
        Ok(match self {
            Self::Afno(config) => Network::Afno(Afno::new(config, params)?),
            Self::DistributedAfno(config) => Network::DistributedAfno(DistributedAfno::new(config, params)?),
            Self::Fno(config) => Network::Fno(Fno::new(config, params)?),
            Self::UNet(config) => Network::UNet(UNet::new(config, params)?),
            Self::FullyConnected(config) => Network::FullyConnected(FullyConnected::new(config, params)?),
        })
    }
}

impl CountParams for ModelConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize, isobar_models::Error> {
        let config: &dyn CountParams = match self {
            Self::Afno(config) => config,
            Self::DistributedAfno(config) => config,
            Self::Fno(config) => config,
            Self::UNet(config) => config,
            Self::FullyConnected(config) => config,
        };
        config.count(count)
    }
}

/// A network of a [`ModelConfig`].
pub enum Network<A = Tensor> {
    /// See [`Afno`].
    Afno(Afno<A>),
    /// See [`DistributedAfno`].
    DistributedAfno(DistributedAfno<A>),
    /// See [`Fno`].
    Fno(Fno<A>),
    /// See [`UNet`].
    UNet(UNet<A>),
    /// See [`FullyConnected`].
    FullyConnected(FullyConnected<A>),
}

impl<A: Array> Network<A> {
    /// Fields `[sample, channel, spatial…]` to fields; `step` while training, `None` for evaluation.
    ///
    /// # Errors
    ///
    /// An input of another shape than the configuration says.
    pub fn forward(&self, x: &A, step: Option<Step<'_>>) -> Result<A, BoxError> {
        let mode = step.map_or(Mode::Eval, |step| Mode::train_part(step.generator, step.offset, step.total));
        Ok(match self {
            Self::Afno(model) => model.forward(x, mode)?,
            Self::DistributedAfno(model) => model.forward(x, mode)?,
            Self::Fno(model) => model.forward(x)?,
            Self::UNet(model) => model.forward(x, mode)?,
            Self::FullyConnected(model) => {
                let last = x.shape().len() as i64 - 1;
                let channels_last: Vec<i64> = [0].into_iter().chain(2..=last).chain([1]).collect();
                let channels_first: Vec<i64> = [0, last].into_iter().chain(1..last).collect();
                model.forward(&x.permute(&channels_last)?)?.permute(&channels_first)?
            }
        })
    }
}
