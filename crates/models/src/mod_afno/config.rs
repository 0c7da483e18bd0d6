//! Arguments of the modulated Adaptive Fourier Neural Operator.

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::embed::ModEmbedConfig;
use super::{MODEL, ModAfno};
use crate::afno::ScaleShiftMode;
use crate::batch::Batch;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`ModAfno`](crate::ModAfno), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModAfnoConfig {
    /// Height and width of the fields.
    pub inp_shape: [usize; 2],
    /// Channels of the input.
    #[serde(default = "in_channels")]
    pub in_channels: usize,
    /// Channels of the output.
    #[serde(default = "out_channels")]
    pub out_channels: usize,
    /// The network that embeds the modulation.
    #[serde(default)]
    pub embed_model: ModEmbedConfig,
    /// Height and width of the patches that become tokens; they divide `inp_shape`.
    #[serde(default = "patch_size")]
    pub patch_size: [usize; 2],
    /// Features of a token.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Features of the embedded modulation.
    #[serde(default = "mod_dim")]
    pub mod_dim: usize,
    /// Modulate the spectral layers.
    #[serde(default = "yes")]
    pub modulate_filter: bool,
    /// Modulate the layers between them.
    #[serde(default = "yes")]
    pub modulate_mlp: bool,
    /// Modulation of spectral coefficients.
    #[serde(default)]
    pub scale_shift_mode: ScaleShiftMode,
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
    /// Fraction of the modes that is kept, of `min(height, width) / 2 + 1` of the token grid.
    #[serde(default = "hard_thresholding_fraction")]
    pub hard_thresholding_fraction: f64,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl ModAfnoConfig {
    /// The defaults for fields of `inp_shape`.
    pub fn new(inp_shape: [usize; 2]) -> Self {
        Self {
            inp_shape,
            in_channels: in_channels(),
            out_channels: out_channels(),
            embed_model: ModEmbedConfig::default(),
            patch_size: patch_size(),
            embed_dim: embed_dim(),
            mod_dim: mod_dim(),
            modulate_filter: true,
            modulate_mlp: true,
            scale_shift_mode: ScaleShiftMode::Complex,
            depth: depth(),
            mlp_ratio: mlp_ratio(),
            drop_rate: 0.0,
            num_blocks: num_blocks(),
            sparsity_threshold: sparsity_threshold(),
            hard_thresholding_fraction: hard_thresholding_fraction(),
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for ModAfnoConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("Adaptive Fourier neural operator, modulated by the time of each sample.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(ModAfno::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_array(MODEL, Batch::<()>::TIME)?;
        fields.check_extents(MODEL, "inp_shape", &self.inp_shape)?;
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            extrapolate(self.embed_model.depth, 1, |embedding| {
                let mut config = Self { depth, ..self.clone() };
                config.embed_model.depth = embedding;
                built(count, |params| ModAfno::new(&config, params))
            })
        })
    }

    fn sharding(&self) -> Sharding {
        super::sharding::declare(self)
    }
}

crate::register!(ModAfnoConfig);

fn in_channels() -> usize {
    155
}

fn out_channels() -> usize {
    73
}

fn patch_size() -> [usize; 2] {
    [2, 2]
}

fn embed_dim() -> usize {
    512
}

fn mod_dim() -> usize {
    64
}

fn yes() -> bool {
    true
}

fn depth() -> usize {
    12
}

fn mlp_ratio() -> f64 {
    2.0
}

fn num_blocks() -> usize {
    1
}

fn sparsity_threshold() -> f64 {
    0.01
}

fn hard_thresholding_fraction() -> f64 {
    1.0
}
