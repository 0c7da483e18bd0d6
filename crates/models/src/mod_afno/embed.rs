//! From a number for each sample to the vector that modulates it.

use std::f64::consts::PI;

use isobar_array::{Array, Unary};
use isobar_nn::Linear;
use isobar_shard::{Init, Params, Placement};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::MODEL;
use crate::error::{Checker, Result};

/// Arguments of the network that embeds the modulation, by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModEmbedConfig {
    /// The number that stands for 1.
    pub max_time: f64,
    /// Features of the embedding: `mod_dim` of the model.
    pub dim: usize,
    /// Number of linear layers, a GELU after each.
    pub depth: usize,
    /// Embedding of a number.
    pub method: EmbedMethod,
}

impl Default for ModEmbedConfig {
    fn default() -> Self {
        Self { max_time: 1.0, dim: 64, depth: 1, method: EmbedMethod::Sinusoidal }
    }
}

/// Embedding of a number τ into d features.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EmbedMethod {
    /// The cosines, then the sines, of π k τ for k from 1 to d / 2.
    #[default]
    Sinusoidal,
    /// max(0, 1 − |(d − 1) τ − k|) for k from 0: neighbours of d places on [0, 1], weighted linearly.
    OneHot,
}

#[derive(Debug)]
pub(super) struct Embedding<A> {
    max_time: f64,
    method: EmbedMethod,
    dim: i64,
    /// Frequencies, or the places.
    places: A,
    layers: Vec<Linear<A>>,
}

impl<A: Array> Embedding<A> {
    /// Checks the arguments that do not depend on the model.
    pub(super) fn check(config: &ModEmbedConfig, mod_dim: i64) -> Result<()> {
        let check = Checker(MODEL);
        let dim = check.extent("dim of embed_model", config.dim)?;
        check
            .ensure(dim == mod_dim, || format!("dim {dim} of embed_model differs from mod_dim {mod_dim}"))?;
        let odd = config.method == EmbedMethod::Sinusoidal && dim % 2 == 1;
        check.ensure(!odd, || format!("dim {dim} of embed_model is odd: cosines and sines come in pairs"))?;
        let time = config.max_time;
        check.ensure(time.is_finite() && time != 0.0, || {
            format!("max_time of embed_model is {time}, expected a finite number other than 0")
        })
    }

    pub(super) fn new(config: &ModEmbedConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let dim = config.dim as i64;
        let whole = Placement::Replicate;
        let places = match config.method {
            EmbedMethod::Sinusoidal => {
                let start = Init::Linspace { start: PI, end: PI * (dim / 2) as f64 };
                params.buffer("sinusoid_embed.freqs", &[dim / 2], start, whole)?
            }
            EmbedMethod::OneHot => {
                let start = Init::Linspace { start: 0.0, end: (dim - 1) as f64 };
                params.buffer("onehot_embed.indices", &[1, dim], start, whole)?
            }
        };
        let layer = |index| Ok(Linear::new(dim, dim, &mut params.scope(&format!("mlp.{}", 2 * index)))?);
        let layers = (0..config.depth).map(layer).collect::<Result<_>>()?;
        Ok(Self { max_time: config.max_time, method: config.method, dim, places, layers })
    }

    /// `[batch, dim]` for `numbers` `[batch, 1]`.
    pub(super) fn forward(&self, numbers: &A) -> Result<A> {
        let time = numbers.mul_scalar(self.max_time.recip())?;
        let mut x = match self.method {
            EmbedMethod::Sinusoidal => {
                let angles = time.mul(&self.places)?;
                A::cat(&[&angles.unary(Unary::Cos)?, &angles.unary(Unary::Sin)?], 1)?
            }
            EmbedMethod::OneHot => {
                let distance =
                    time.mul_scalar((self.dim - 1) as f64)?.sub(&self.places)?.unary(Unary::Abs)?;
                // As in the source, a place at distance 1 has a gradient: that of a clamp, not of a ReLU.
                distance.unary(Unary::Neg)?.add_scalar(1.0)?.unary(Unary::Clamp { min: 0.0, max: 1.0 })?
            }
        };
        for layer in &self.layers {
            x = layer.forward(&x)?.gelu()?;
        }
        Ok(x)
    }
}
