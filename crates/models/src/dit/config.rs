//! Arguments of DiT.

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::kwargs::{
    AttentionBackend, DetokenizerKind, DitAttention, DitBlockOptions, DitConditioning, DitDetokenizer,
    DitEmbedder, DitPositions, DitTokenizer, LayerNormBackend, TokenizerKind,
};
use super::{Dit, MODEL};
use crate::batch::Batch;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::layers::PerDim;
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`Dit`](crate::Dit), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DitConfig {
    /// Height and width of the fields, or depth, height and width; one number for a square.
    pub input_size: PerDim,
    /// Channels of the input.
    pub in_channels: usize,
    /// Extents of the patches that become tokens, or one for all dims; they divide `input_size`.
    #[serde(default = "patch_size")]
    pub patch_size: PerDim,
    /// Network that turns fields into tokens.
    #[serde(default)]
    pub tokenizer: TokenizerKind,
    /// Network that turns tokens into fields.
    #[serde(default)]
    pub detokenizer: DetokenizerKind,
    /// Channels of the output; as many as of the input where not given.
    #[serde(default)]
    pub out_channels: Option<usize>,
    /// Features of a token.
    #[serde(default = "hidden_size")]
    pub hidden_size: usize,
    /// Number of blocks.
    #[serde(default = "depth")]
    pub depth: usize,
    /// Number of attention heads; it divides `hidden_size`.
    #[serde(default = "num_heads")]
    pub num_heads: usize,
    /// Width of the perceptrons' hidden layer, in multiples of `hidden_size`.
    #[serde(default = "mlp_ratio")]
    pub mlp_ratio: f64,
    /// Attention among tokens.
    #[serde(default)]
    pub attention_backend: AttentionBackend,
    /// Implementation of layer norms; the numbers are the same.
    #[serde(default)]
    pub layernorm_backend: LayerNormBackend,
    /// Features of the conditions; none where not given.
    #[serde(default)]
    pub condition_dim: Option<usize>,
    /// Network that embeds times and conditions.
    #[serde(default)]
    pub conditioning_embedder: DitEmbedder,
    /// Initial values of DiT, with which a fresh model gives 0; otherwise PyTorch's.
    #[serde(default = "yes")]
    pub dit_initialization: bool,
    /// Arguments of the network that embeds times and conditions.
    #[serde(default)]
    pub conditioning_embedder_kwargs: DitConditioning,
    /// Arguments of the tokenizer.
    #[serde(default)]
    pub tokenizer_kwargs: DitTokenizer,
    /// Arguments of the detokenizer.
    #[serde(default)]
    pub detokenizer_kwargs: DitDetokenizer,
    /// Arguments of the blocks.
    #[serde(default)]
    pub block_kwargs: DitBlockOptions,
    /// Arguments of the attention.
    #[serde(default)]
    pub attn_kwargs: DitAttention,
    /// Probability with which training leaves out the branches of a block for a sample, for each block; 0 where not given.
    #[serde(default)]
    pub drop_path_rates: Option<Vec<f64>>,
    /// Computes tokenizer and detokenizer in single precision under mixed precision.
    #[serde(default)]
    pub force_tokenization_fp32: bool,
    /// For attention in windows: gives each block a trained token. It replaces, in the input of attention, the tokens that
    /// contain a point marked by the array `invalid_mask` of the batch. The fields must be finite at these points.
    #[serde(default)]
    pub use_nan_mask_tokens: bool,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl DitConfig {
    /// The defaults for fields of `input_size` with the given channels.
    pub fn new(input_size: [usize; 2], in_channels: usize) -> Self {
        Self {
            input_size: PerDim::Each(input_size.to_vec()),
            in_channels,
            patch_size: patch_size(),
            tokenizer: TokenizerKind::default(),
            detokenizer: DetokenizerKind::default(),
            out_channels: None,
            hidden_size: hidden_size(),
            depth: depth(),
            num_heads: num_heads(),
            mlp_ratio: mlp_ratio(),
            attention_backend: AttentionBackend::default(),
            layernorm_backend: LayerNormBackend::default(),
            condition_dim: None,
            conditioning_embedder: DitEmbedder::default(),
            dit_initialization: true,
            conditioning_embedder_kwargs: DitConditioning::default(),
            tokenizer_kwargs: DitTokenizer::default(),
            detokenizer_kwargs: DitDetokenizer::default(),
            block_kwargs: DitBlockOptions::default(),
            attn_kwargs: DitAttention::default(),
            drop_path_rates: None,
            force_tokenization_fp32: false,
            use_nan_mask_tokens: false,
            gradient_checkpointing: false,
        }
    }

    /// Channels of the output; 0 stands for those of the input.
    pub(super) fn outputs(&self) -> usize {
        self.out_channels.filter(|&channels| channels > 0).unwrap_or(self.in_channels)
    }

    /// Returns whether tokens have trained positions.
    pub(super) fn has_positions(&self) -> bool {
        self.attention_backend != AttentionBackend::Natten2dRope
            && self.tokenizer_kwargs.pos_embed.unwrap_or_default() == DitPositions::Learnable
    }

    /// Number of convolutions behind the detokenizer.
    pub(super) fn conv_layers(&self) -> usize {
        match self.detokenizer {
            DetokenizerKind::ProjReshape2d => 0,
            DetokenizerKind::ProjReshape2dConv => self.detokenizer_kwargs.conv_layers.unwrap_or(2),
        }
    }

    /// Another number of blocks, and of convolutions if there are some.
    fn resized(&self, depth: usize, conv_layers: usize) -> Self {
        let mut config = Self { depth, drop_path_rates: None, ..self.clone() };
        if self.detokenizer == DetokenizerKind::ProjReshape2dConv {
            config.detokenizer_kwargs.conv_layers = Some(conv_layers);
        }
        config
    }
}

impl Architecture for DitConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("Diffusion transformer: attention among patches, modulated by the time of each sample.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Dit::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "input_size", &self.input_size.list(2))?;
        if self.condition_dim.is_some_and(|features| features > 0) {
            fields.check_array(MODEL, Batch::<()>::CONDITIONS)?;
        }
        if self.use_nan_mask_tokens {
            fields.check_array(MODEL, Batch::<()>::INVALID_MASK)?;
        }
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.outputs()))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        super::arguments::check_rates(self)?;
        extrapolate(self.depth, 1, |depth| {
            extrapolate(self.conv_layers(), 2, |conv_layers| {
                built(count, |params| Dit::new(&self.resized(depth, conv_layers), params))
            })
        })
    }

    fn sharding(&self) -> Sharding {
        super::sharding::declare(self)
    }

    fn unread(&self) -> Vec<String> {
        let torch = LayerNormBackend::Torch;
        let keys = [
            ("layernorm_backend", self.layernorm_backend != torch),
            ("block_kwargs.intermediate_dropout", self.block_kwargs.intermediate_dropout),
            ("attn_kwargs.norm_layer", self.attn_kwargs.norm_layer.is_some_and(|backend| backend != torch)),
        ];
        keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key.to_owned()).collect()
    }
}

crate::register!(DitConfig);

fn patch_size() -> PerDim {
    PerDim::Each(vec![8, 8])
}

fn hidden_size() -> usize {
    384
}

fn depth() -> usize {
    12
}

fn num_heads() -> usize {
    8
}

fn mlp_ratio() -> f64 {
    4.0
}

fn yes() -> bool {
    true
}
