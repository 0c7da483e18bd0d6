//! Arguments of the Adaptive Fourier Neural Operator.

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Afno, MODEL};
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::registry::ModelConfig;
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`Afno`](crate::Afno), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AfnoConfig {
    /// Height and width of the fields.
    pub inp_shape: [usize; 2],
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Height and width of the patches that become tokens; they divide `inp_shape`.
    #[serde(default = "patch_size")]
    pub patch_size: [usize; 2],
    /// Features of a token.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Number of blocks.
    #[serde(default = "depth")]
    pub depth: usize,
    /// Width of the hidden layer between the mixings, in multiples of `embed_dim`.
    #[serde(default = "mlp_ratio")]
    pub mlp_ratio: f64,
    /// Probability of dropout, after the embedding and inside the layers between the mixings.
    #[serde(default)]
    pub drop_rate: f64,
    /// Number of independent groups of features in the spectral weights; it divides `embed_dim`.
    #[serde(default = "num_blocks")]
    pub num_blocks: usize,
    /// Spectral coefficients are moved towards 0 by this much.
    #[serde(default = "sparsity_threshold")]
    pub sparsity_threshold: f64,
    /// Fraction of the modes that is kept, of `height / 2 + 1` of the token grid.
    #[serde(default = "hard_thresholding_fraction")]
    pub hard_thresholding_fraction: f64,
    /// Keep the rows of the lowest frequencies, and limit columns by the width; weights that PhysicsNeMo trained need it off.
    #[serde(default)]
    pub corrected_modes: bool,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl AfnoConfig {
    /// The defaults for fields of `inp_shape` with the given channels.
    pub fn new(inp_shape: [usize; 2], in_channels: usize, out_channels: usize) -> Self {
        Self {
            inp_shape,
            in_channels,
            out_channels,
            patch_size: patch_size(),
            embed_dim: embed_dim(),
            depth: depth(),
            mlp_ratio: mlp_ratio(),
            drop_rate: 0.0,
            num_blocks: num_blocks(),
            sparsity_threshold: sparsity_threshold(),
            hard_thresholding_fraction: hard_thresholding_fraction(),
            corrected_modes: false,
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for AfnoConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some("Adaptive Fourier neural operator.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Afno::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "inp_shape", &self.inp_shape)?;
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            built(count, |params| Afno::new(&Self { depth, ..self.clone() }, params))
        })
    }

    fn sharding(&self) -> Sharding {
        super::sharding::declare(self)
    }
}

crate::register!(AfnoConfig);

fn patch_size() -> [usize; 2] {
    [16, 16]
}

fn embed_dim() -> usize {
    256
}

fn depth() -> usize {
    4
}

fn mlp_ratio() -> f64 {
    4.0
}

fn num_blocks() -> usize {
    16
}

fn sparsity_threshold() -> f64 {
    0.01
}

fn hard_thresholding_fraction() -> f64 {
    1.0
}

impl Default for ModelConfig {
    /// The model of a configuration that names none.
    fn default() -> Self {
        let defaults = AfnoConfig::new([64, 64], 1, 1);
        Self::new(AfnoConfig { patch_size: [4, 4], embed_dim: 128, depth: 4, ..defaults })
    }
}
