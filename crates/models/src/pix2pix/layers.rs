//! Layers of the network.

use isobar_array::Array;
use isobar_nn::{ActivationLayer, BatchNorm, ConvNd, ConvTransposeNd, Mode};
use isobar_shard::Params;

use super::Pix2PixConfig;
use crate::error::Result;

/// A convolution, then a batch norm if the network has them, then an activation except in the last stage.
#[derive(Debug)]
pub(super) struct Stage<A> {
    conv: Convolution<A>,
    norm: Option<BatchNorm<A>>,
    activation: Option<ActivationLayer<A>>,
}

#[derive(Debug)]
pub(super) enum Convolution<A> {
    Plain(ConvNd<A>),
    Transposed(ConvTransposeNd<A>),
}

impl<A: Array> Stage<A> {
    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let mut y = match &self.conv {
            Convolution::Plain(conv) => conv.forward(x)?,
            Convolution::Transposed(conv) => conv.forward(x)?,
        };
        if let Some(norm) = &self.norm {
            y = norm.forward(&y, mode)?;
        }
        match &self.activation {
            Some(activation) => Ok(activation.forward(&y)?),
            None => Ok(y),
        }
    }
}

/// Two convolutions with a skip connection.
#[derive(Debug)]
pub(super) struct Residual<A>(pub(super) [Stage<A>; 2]);

impl<A: Array> Residual<A> {
    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let [first, second] = &self.0;
        Ok(second.forward(&first.forward(x, mode)?, mode)?.add(x)?)
    }
}

/// Makes stages, whose modules are numbered in the state dict. All share one activation.
pub(super) struct Stages<'a, A> {
    pub(super) config: &'a Pix2PixConfig,
    /// The activation and its first name.
    pub(super) activation: Option<(ActivationLayer<A>, String)>,
}

/// A list of modules: the list's name, and the number of the next one.
pub(super) struct Modules(pub(super) String, pub(super) usize);

impl Modules {
    /// Name of the next module.
    pub(super) fn next(&mut self) -> String {
        self.1 += 1;
        format!("{}.{}", self.0, self.1 - 1)
    }
}

impl<A: Array> Stages<'_, A> {
    /// Makes a stage of `width` channels, with or without an activation.
    pub(super) fn stage<P: Params<Array = A>>(
        &mut self,
        at: &mut Modules,
        (width, activates): (i64, bool),
        params: &mut P,
        conv: impl FnOnce(&str, &mut P) -> Result<Convolution<A>>,
    ) -> Result<Stage<A>> {
        let conv = conv(&at.next(), params)?;
        let norm = match self.config.batch_norm {
            true => Some(BatchNorm::new(width, &mut params.scope(&at.next()))?),
            false => None,
        };
        let activation = if activates { Some(self.activation(at.next(), params)?) } else { None };
        Ok(Stage { conv, norm, activation })
    }

    fn activation(
        &mut self,
        name: String,
        params: &mut impl Params<Array = A>,
    ) -> Result<ActivationLayer<A>> {
        if let Some((activation, first)) = &self.activation {
            activation.tie(&name, first, params)?;
            return Ok(activation.shallow_clone());
        }
        let activation = ActivationLayer::new(self.config.activation_fn, &mut params.scope(&name))?;
        let shared = activation.shallow_clone();
        self.activation = Some((activation, name));
        Ok(shared)
    }
}
