//! Arguments of the channel-parallel Adaptive Fourier Neural Operator.

use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DistributedAfno, MODEL};
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model, ModelArray};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};

/// Arguments of [`DistributedAfno`](crate::DistributedAfno), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DistributedAfnoConfig {
    /// Height and width of the fields.
    pub inp_shape: [usize; 2],
    /// Channels of the input, all ranks' together.
    pub in_channels: usize,
    /// Channels of the output, all ranks' together; as many as of the input where not given.
    #[serde(default)]
    pub out_channels: Option<usize>,
    /// Height and width of the patches that become tokens; it divides `inp_shape`.
    #[serde(default = "patch_size")]
    pub patch_size: usize,
    /// Features of a token; a multiple of the number of ranks.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Number of blocks.
    #[serde(default = "depth")]
    pub depth: usize,
    /// Number of independent groups of features in the spectral weights; it divides `embed_dim`, and is a multiple of the
    /// number of ranks.
    #[serde(default = "num_blocks")]
    pub num_blocks: usize,
    /// Each rank is given its part of the input's channels.
    #[serde(default)]
    pub channel_parallel_inputs: bool,
    /// Each rank returns its part of the output's channels.
    #[serde(default)]
    pub channel_parallel_outputs: bool,
    /// Probability of dropout, after the embedding and inside the layers between the mixings.
    #[serde(default)]
    pub drop_rate: f64,
    /// Probability that the last block's second half is left out for a sample; it grows linearly from 0 at the first.
    #[serde(default)]
    pub drop_path_rate: f64,
    /// Recompute the activations of the blocks in backward, communication included: less memory, about a third more time,
    /// the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl DistributedAfnoConfig {
    /// The defaults for fields of `inp_shape` with `in_channels` channels in and out.
    pub fn new(inp_shape: [usize; 2], in_channels: usize) -> Self {
        Self {
            inp_shape,
            in_channels,
            out_channels: None,
            patch_size: patch_size(),
            embed_dim: embed_dim(),
            depth: depth(),
            num_blocks: num_blocks(),
            channel_parallel_inputs: false,
            channel_parallel_outputs: false,
            drop_rate: 0.0,
            drop_path_rate: 0.0,
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for DistributedAfnoConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("Adaptive Fourier neural operator with its channels over the model-parallel group.");
    const MODEL_PARALLEL: bool = true;

    fn build<A: ModelArray>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(DistributedAfno::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "inp_shape", &self.inp_shape)?;
        let outputs = self.out_channels.unwrap_or(self.in_channels);
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", outputs))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            built(count, |params| DistributedAfno::new(&Self { depth, ..self.clone() }, params))
        })
    }

    fn sharding(&self) -> Sharding {
        super::sharding::declare(self)
    }
}

crate::register!(DistributedAfnoConfig);

fn patch_size() -> usize {
    16
}

fn embed_dim() -> usize {
    256
}

fn depth() -> usize {
    4
}

fn num_blocks() -> usize {
    4
}
