//! Sizes of models, counted from their configurations alone.
//!
//! A model is built from a [`ParamCount`] at most twice for each kind of layer, with few layers; each further
//! layer adds the same amount. A configuration of 10⁹ layers is thus counted as fast as one of two, and
//! nothing is allocated.

use isobar_shard::{ModelSize, ParamCount};

use crate::error::Result;
use crate::{
    Afno, AfnoConfig, DistributedAfno, DistributedAfnoConfig, Fno, FnoConfig, FullyConnected,
    FullyConnectedConfig, ModAfno, ModAfnoConfig, SrResNet, SrResNetConfig, UNet, UNetConfig,
};

/// Configuration whose model's parameters can be counted without building it.
pub trait CountParams {
    /// Counts the parameters and buffers of one rank. `count` makes an empty [`ParamCount`] for the ranks that share the
    /// model. Does not communicate.
    ///
    /// # Errors
    ///
    /// Invalid arguments of the model.
    ///
    /// ```
    /// use isobar_models::{CountParams, FnoConfig, PerDim};
    /// use isobar_shard::ParamCount;
    ///
    /// let config = FnoConfig { num_fno_modes: PerDim::All(100_000), ..FnoConfig::new(1, 1) };
    /// let size = config.count(&ParamCount::default)?;
    /// assert!(size.trained > 80_000_000_000_000); // and none of them was made
    /// # Ok::<(), isobar_models::Error>(())
    /// ```
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize>;
}

/// Size of a model of `layers` equal layers. Layers beyond the first `same` are alike.
fn extrapolate(layers: usize, same: usize, size: impl Fn(usize) -> Result<ModelSize>) -> Result<ModelSize> {
    if layers <= same + 1 {
        return size(layers);
    }
    let (few, more) = (size(same)?, size(same + 1)?);
    Ok(few + (more - few) * (layers - same) as u128)
}

/// Builds with a fresh counter and returns what it counted.
fn built<T>(
    count: &dyn Fn() -> ParamCount,
    build: impl FnOnce(&mut ParamCount) -> Result<T>,
) -> Result<ModelSize> {
    let mut count = count();
    build(&mut count)?;
    Ok(count.size())
}

impl CountParams for AfnoConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            built(count, |params| Afno::new(&Self { depth, ..self.clone() }, params))
        })
    }
}

impl CountParams for DistributedAfnoConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            built(count, |params| DistributedAfno::new(&Self { depth, ..self.clone() }, params))
        })
    }
}

impl CountParams for ModAfnoConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            extrapolate(self.embed_model.depth, 1, |embedding| {
                let mut config = Self { depth, ..self.clone() };
                config.embed_model.depth = embedding;
                built(count, |params| ModAfno::new(&config, params))
            })
        })
    }
}

impl CountParams for FnoConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.num_fno_layers, 1, |num_fno_layers| {
            extrapolate(self.decoder_layers, 1, |decoder_layers| {
                let config = Self { num_fno_layers, decoder_layers, ..self.clone() };
                built(count, |params| Fno::new(&config, params))
            })
        })
    }
}

impl CountParams for FullyConnectedConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        // The last of the listed activations serves all further layers.
        let same = self.activation_fn.len().max(1);
        extrapolate(self.num_layers, same, |num_layers| {
            built(count, |params| FullyConnected::new(&Self { num_layers, ..self.clone() }, params))
        })
    }
}

impl CountParams for SrResNetConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.n_resid_blocks, 1, |n_resid_blocks| {
            built(count, |params| SrResNet::new(&Self { n_resid_blocks, ..self.clone() }, params))
        })
    }
}

impl CountParams for UNetConfig {
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        // Every level is listed in `feature_map_channels`.
        built(count, |params| UNet::new(self, params))
    }
}
