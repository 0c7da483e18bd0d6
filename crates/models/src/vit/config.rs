//! Arguments of the vision transformer.

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{MODEL, Vit};
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::layers::{PerDim, QkNorm};
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`Vit`](crate::Vit).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VitConfig {
    /// Height and width of the fields, one number for a square.
    pub inp_shape: PerDim,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Height and width of the patches that become tokens, one number for a square; they divide `inp_shape`.
    #[serde(default = "patch_size")]
    pub patch_size: PerDim,
    /// Features of a token.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Number of blocks.
    #[serde(default = "depth")]
    pub depth: usize,
    /// Number of attention heads; it divides `embed_dim`.
    #[serde(default = "num_heads")]
    pub num_heads: usize,
    /// Width of the perceptrons' hidden layer, in multiples of `embed_dim`.
    #[serde(default = "mlp_ratio")]
    pub mlp_ratio: f64,
    /// The projection to queries, keys and values has a bias.
    #[serde(default = "yes")]
    pub qkv_bias: bool,
    /// Height and width of the window of attention in tokens, odd, one number for a square (neighbourhood attention: Hassani et al.,
    /// arXiv:2204.07143). Windows at a border are shifted into the grid. Attention is global where it is not given.
    #[serde(default)]
    pub attn_kernel: Option<PerDim>,
    /// Norm of queries and keys over the features of a head; none where not given.
    #[serde(default)]
    pub qk_norm: Option<QkNorm>,
    /// Positions of tokens.
    #[serde(default)]
    pub pos_embed: VitPositions,
    /// Base of the frequencies of rotary positions.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// Dropout after the positions and in the perceptrons.
    #[serde(default)]
    pub drop_rate: f64,
    /// Dropout of the attention weights.
    #[serde(default)]
    pub attn_drop_rate: f64,
    /// Dropout after the attention.
    #[serde(default)]
    pub proj_drop_rate: f64,
    /// Probability with which training leaves out the branches of the last block for a sample; it grows linearly from 0 in the first.
    #[serde(default)]
    pub drop_path_rate: f64,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

/// Positions of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VitPositions {
    /// A trained vector for each token, added to it.
    #[default]
    Learned,
    /// Queries and keys rotated by their rows and columns in the global grid: the attention of two tokens depends on the distance
    /// between them. A head needs a multiple of 4 features.
    Rotary,
    /// None.
    None,
}

impl VitConfig {
    /// The defaults for fields of `inp_shape` with the given channels.
    pub fn new(inp_shape: [usize; 2], in_channels: usize, out_channels: usize) -> Self {
        Self {
            inp_shape: PerDim::Each(inp_shape.to_vec()),
            in_channels,
            out_channels,
            patch_size: patch_size(),
            embed_dim: embed_dim(),
            depth: depth(),
            num_heads: num_heads(),
            mlp_ratio: mlp_ratio(),
            qkv_bias: true,
            attn_kernel: None,
            qk_norm: None,
            pos_embed: VitPositions::default(),
            rope_theta: rope_theta(),
            drop_rate: 0.0,
            attn_drop_rate: 0.0,
            proj_drop_rate: 0.0,
            drop_path_rate: 0.0,
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for VitConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some("Vision transformer on fields: attention among patches.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Vit::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "inp_shape", &self.inp_shape.list(2))?;
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            built(count, |params| Vit::new(&Self { depth, ..self.clone() }, params))
        })
    }

    fn sharding(&self) -> Sharding {
        super::sharding::declare(self)
    }
}

crate::register!(VitConfig);

fn patch_size() -> PerDim {
    PerDim::Each(vec![8, 8])
}

fn embed_dim() -> usize {
    384
}

fn depth() -> usize {
    12
}

fn num_heads() -> usize {
    6
}

fn mlp_ratio() -> f64 {
    4.0
}

fn rope_theta() -> f64 {
    10_000.0
}

fn yes() -> bool {
    true
}
