//! Choices and nested arguments of DiT.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::layers::{PerDim, QkNorm};

/// Attention of DiT.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttentionBackend {
    /// All tokens attend to all, as timm's `Attention`.
    #[default]
    Timm,
    /// Global attention by NVIDIA's Transformer Engine: not supported. Its state dict has timm's `qkv` as three
    /// tensors, `qkv.{query,key,value}_{weight,bias}`, and its layer norm of queries and keys has ε = 10⁻⁶, not 10⁻⁵.
    TransformerEngine,
    /// Tokens attend to a window around them (Hassani et al., *Neighborhood Attention Transformer*, arXiv:2204.07143).
    Natten2d,
    /// Attention in the windows of `natten2d`, with rotary instead of trained positions.
    Natten2dRope,
    /// Windows of `natten2d` on fields of three dims.
    Natten3d,
}

/// Implementation of layer norms; the numbers are the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerNormBackend {
    /// PyTorch's.
    #[default]
    Torch,
    /// That of Apex.
    Apex,
}

/// Network that turns times and conditions into one vector for each sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DitEmbedder {
    /// Times and conditions are embedded apart, and added.
    #[default]
    Dit,
    /// Conditions are added to the embedding of times, then two layers follow, as in SongUNet.
    Edm,
    /// No vector: times are ignored, and the modulations are trained constants.
    Zero,
}

/// Network that turns fields into tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TokenizerKind {
    /// A linear layer on patches, and positions.
    #[default]
    #[serde(rename = "patch_embed_2d")]
    PatchEmbed2d,
}

/// Network that turns tokens into fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DetokenizerKind {
    /// A modulated linear layer to patches.
    #[default]
    #[serde(rename = "proj_reshape_2d")]
    ProjReshape2d,
    /// A modulated linear layer to patches, plus the output of convolutions on the resulting fields, which smooth the
    /// seams.
    #[serde(rename = "proj_reshape_2d_conv")]
    ProjReshape2dConv,
}

/// Embedding of times as cosines and sines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EmbedFn {
    /// The cosines, then the sines.
    CosSin,
    /// The sines, then the cosines.
    NpSinCos,
}

/// Arguments of the network that embeds times and conditions, by PhysicsNeMo's names. Those of another embedder are refused.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DitConditioning {
    /// Period of the slowest frequency, over 2π; 10000 where not given.
    pub max_positions: Option<f64>,
    /// For `dit`: makes 1 / `max_positions` the slowest frequency; otherwise frequencies end one step before it. Off
    /// where not given.
    pub endpoint: Option<bool>,
    /// Of `dit`: number of cosines and sines; `hidden_size` where not given.
    pub freq_embed_dim: Option<usize>,
    /// Of `dit`: width of the hidden layer; twice `hidden_size` where not given.
    pub mlp_hidden_dim: Option<usize>,
    /// Of `dit`: order of cosines and sines; `cos_sin` where not given.
    pub embed_fn: Option<EmbedFn>,
    /// Of `edm`: features of the vector, which must be `hidden_size`. Needed there.
    pub emb_channels: Option<usize>,
    /// Of `edm`: number of sines and cosines. Needed there.
    pub noise_channels: Option<usize>,
    /// Of `edm`: probability with which training sets the condition of a sample to 0; 0 where not given.
    pub condition_dropout: Option<f64>,
    /// Of `edm`: without `condition_dim`, keeps the layer of older models for no conditions, which nothing uses, in the state dict.
    pub legacy_condition_bias: Option<bool>,
}

/// Positions of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DitPositions {
    /// A trained vector for each token.
    #[default]
    Learnable,
    /// None.
    None,
}

/// Arguments of the tokenizer, by PhysicsNeMo's names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DitTokenizer {
    /// Positions that are added to tokens; `learnable` where not given. Always `none` with `natten2d_rope`.
    pub pos_embed: Option<DitPositions>,
}

/// Arguments of the detokenizer `proj_reshape_2d_conv`, by PhysicsNeMo's names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DitDetokenizer {
    /// Number of convolutions; 2 where not given.
    pub conv_layers: Option<usize>,
    /// Channels between them; 64 where not given.
    pub conv_hidden: Option<usize>,
    /// Extent of their kernels, an odd number; 3 where not given.
    pub conv_kernel: Option<usize>,
}

/// Arguments of the blocks, by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DitBlockOptions {
    /// ε of the layer norms.
    pub norm_eps: f64,
    /// Accepted and without effect: the probability of this dropout is an argument of PhysicsNeMo's forward pass.
    pub intermediate_dropout: bool,
    /// Dropout of the attention weights; of windowed attention, of the result.
    pub attn_drop_rate: f64,
    /// Dropout after the attention.
    pub proj_drop_rate: f64,
    /// Dropout in the perceptron. Where it is not 0, the second layer is `linear.layers.3` in the state dict.
    pub mlp_drop_rate: f64,
    /// Dropout after the perceptron too.
    pub final_mlp_dropout: bool,
}

impl Default for DitBlockOptions {
    fn default() -> Self {
        Self {
            norm_eps: 1e-6,
            intermediate_dropout: false,
            attn_drop_rate: 0.0,
            proj_drop_rate: 0.0,
            mlp_drop_rate: 0.0,
            final_mlp_dropout: true,
        }
    }
}

/// Arguments of the attention, by PhysicsNeMo's names. Those of another backend are refused.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DitAttention {
    /// Of `timm`: norm of queries and keys; none where not given.
    pub qk_norm_type: Option<QkNorm>,
    /// For `timm`: gives the norm of queries and keys parameters; on where not given.
    pub qk_norm_affine: Option<bool>,
    /// Of `timm`: a token attends only to itself and those before it in row-major order. Off where not given.
    pub is_causal: Option<bool>,
    /// Of `timm`: adds a bias to the output projection; on where not given.
    pub proj_bias: Option<bool>,
    /// Of attention in windows: tokens of the window along each dim, odd numbers; 3 where not given.
    pub attn_kernel: Option<PerDim>,
    /// For attention in windows: adds a bias to the projection to queries, keys and values; on where not
    /// given.
    pub qkv_bias: Option<bool>,
    /// Of attention in windows: layer norm of queries and keys, without parameters. Off where not given.
    pub qk_norm: Option<bool>,
    /// Of attention in windows: implementation of the norm `qk_norm`; `layernorm_backend` where not given. Results are the same.
    pub norm_layer: Option<LayerNormBackend>,
    /// Of `natten2d_rope`: base of the frequencies; 10000 where not given.
    pub rope_theta: Option<f64>,
}
