//! Tables of the arguments: encoder, decoder, blocks and activations.

use schemars::JsonSchema;
use serde::de::{Error as _, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};

/// The way down: a block on each grid, and poolings between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixEncoder {
    /// `UNetEncoder`.
    #[serde(rename = "_target_", default = "encoder_class")]
    pub target: String,
    /// Block on each grid. Its channels, dilation and number of layers come from the lists.
    pub conv_block: HealpixBlock,
    /// Pooling to the next grid.
    #[serde(default)]
    pub down_sampling_block: HealpixPooling,
    /// Recurrent block, which is not supported: nothing, or `null`.
    #[serde(default, skip_serializing, deserialize_with = "no_recurrence")]
    #[schemars(skip)]
    pub recurrent_block: (),
    /// Channels on each grid, the finest first.
    #[serde(default = "encoder_channels")]
    pub n_channels: Vec<usize>,
    /// Number of convolutions of each block, of basic blocks; of symmetric blocks, of multiple ones.
    #[serde(default = "encoder_layers")]
    pub n_layers: Vec<usize>,
    /// Dilation of the convolutions on each grid; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dilations: Option<Vec<usize>>,
    /// Setting of Hydra; no effect here.
    #[serde(rename = "_recursive_", default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
}

/// The way up: a block on each grid, upsamplings between them, and a last block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixDecoder {
    /// `UNetDecoder`.
    #[serde(rename = "_target_", default = "decoder_class")]
    pub target: String,
    /// Block on each grid. Its channels, dilation and number of layers come from the lists.
    pub conv_block: HealpixBlock,
    /// Upsampling to the next grid.
    #[serde(default)]
    pub up_sampling_block: HealpixUpsampling,
    /// Block that makes the output. Its channels and dilation come from the other arguments.
    pub output_layer: HealpixBlock,
    /// Recurrent block behind the block of each grid, whose state goes on from step to step; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrent_block: Option<HealpixRecurrence>,
    /// Channels on each grid, the coarsest first: those of the encoder, reversed.
    #[serde(default = "decoder_channels")]
    pub n_channels: Vec<usize>,
    /// Number of convolutions of each block, of basic blocks; of symmetric blocks, of multiple ones.
    #[serde(default = "decoder_layers")]
    pub n_layers: Vec<usize>,
    /// Dilation of the convolutions on each grid; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dilations: Option<Vec<usize>>,
    /// Setting of Hydra; no effect here.
    #[serde(rename = "_recursive_", default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
}

/// A block of convolutions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixBlock {
    /// `BasicConvBlock`, `ConvNeXtBlock`, `DoubleConvNeXtBlock`, `SymmetricConvNeXtBlock` or `Multi_SymmetricConvNeXtBlock`.
    #[serde(rename = "_target_")]
    pub target: String,
    /// Number that another argument replaces; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_channels: Option<usize>,
    /// Number that another argument replaces; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_channels: Option<usize>,
    /// Channels between the convolutions of the output layer, by default the greater one of its inputs and outputs; no effect in
    /// other blocks, which get those of their grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent_channels: Option<usize>,
    /// Extent of the kernels, odd.
    #[serde(default = "kernel_size")]
    pub kernel_size: usize,
    /// Number that `dilations` replaces; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dilation: Option<usize>,
    /// Number of convolutions of the output layer if that is a basic block, of blocks if it is a multiple one; no effect in other
    /// blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_layers: Option<usize>,
    /// Channels inside of the ConvNeXt blocks, in multiples of those of the grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upscale_factor: Option<usize>,
    /// Activation behind the convolutions; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<HealpixFunction>,
    /// Memory format of convolutions in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_nhwc: Option<bool>,
    /// Kernel of the padding in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_healpixpad: Option<bool>,
    /// Setting of Hydra; no effect here.
    #[serde(rename = "_recursive_", default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
}

/// A recurrent block: a gated unit with convolutions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixRecurrence {
    /// `ConvGRUBlock`.
    #[serde(rename = "_target_")]
    pub target: String,
    /// Number that another argument replaces; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_channels: Option<usize>,
    /// Extent of the kernels, odd.
    #[serde(default = "one")]
    pub kernel_size: usize,
    /// Memory format of convolutions in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_nhwc: Option<bool>,
    /// Kernel of the padding in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_healpixpad: Option<bool>,
    /// Setting of Hydra; no effect here.
    #[serde(rename = "_recursive_", default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
}

/// Fields of another model that are inputs of this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HealpixCoupling {
    /// Class that prepares the fields; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coupler: Option<String>,
    /// The fields.
    pub params: HealpixCoupled,
}

/// Variables and times of the fields of another model. Further keys have no effect here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HealpixCoupled {
    /// Names of the variables.
    pub variables: Vec<String>,
    /// Times of each of them, such as `"48h"`.
    pub input_times: Vec<String>,
}

/// Pooling to a coarser grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixPooling {
    /// `HEALPixAvgPool` or `HEALPixMaxPool`; also `AvgPool` or `MaxPool`.
    #[serde(rename = "_target_")]
    pub target: String,
    /// Extent of the squares of points that become one.
    #[serde(default = "pooling")]
    pub pooling: usize,
    /// Memory format of convolutions in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_nhwc: Option<bool>,
    /// Kernel of the padding in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_healpixpad: Option<bool>,
    /// Setting of Hydra; no effect here.
    #[serde(rename = "_recursive_", default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
}

impl Default for HealpixPooling {
    fn default() -> Self {
        Self {
            target: "HEALPixAvgPool".to_owned(),
            pooling: pooling(),
            enable_nhwc: None,
            enable_healpixpad: None,
            recursive: None,
        }
    }
}

/// Upsampling to a finer grid by a transposed convolution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixUpsampling {
    /// `TransposedConvUpsample`.
    #[serde(rename = "_target_")]
    pub target: String,
    /// Number that another argument replaces; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_channels: Option<usize>,
    /// Number that another argument replaces; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_channels: Option<usize>,
    /// Extent of the square of points that each point becomes: that of the pooling.
    #[serde(default = "pooling")]
    pub upsampling: usize,
    /// Activation behind the convolution; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<HealpixFunction>,
    /// Memory format of convolutions in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_nhwc: Option<bool>,
    /// Kernel of the padding in PyTorch; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_healpixpad: Option<bool>,
    /// Setting of Hydra; no effect here.
    #[serde(rename = "_recursive_", default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
}

impl Default for HealpixUpsampling {
    fn default() -> Self {
        Self {
            target: "TransposedConvUpsample".to_owned(),
            in_channels: None,
            out_channels: None,
            upsampling: pooling(),
            activation: None,
            enable_nhwc: None,
            enable_healpixpad: None,
            recursive: None,
        }
    }
}

/// An activation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixFunction {
    /// `CappedGELU`, `CappedLeakyReLU`, or one of PyTorch's `ELU`, `GELU`, `Identity`, `LeakyReLU`, `Mish`, `PReLU`, `ReLU`, `SELU`,
    /// `SiLU`, `Sigmoid`, `Softplus`, `Softsign` and `Tanh`.
    #[serde(rename = "_target_")]
    pub target: String,
    /// Greatest value of the capped functions; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap_value: Option<f64>,
    /// `none` or `tanh`, of GELU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approximate: Option<String>,
    /// Slope below 0 of the leaky ReLUs; 0.01 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub negative_slope: Option<f64>,
    /// Memory of PyTorch's activations; no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inplace: Option<bool>,
    /// Setting of Hydra; no effect here.
    #[serde(rename = "_recursive_", default, skip_serializing_if = "Option::is_none")]
    pub recursive: Option<bool>,
}

fn no_recurrence<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    match Option::<IgnoredAny>::deserialize(deserializer)? {
        None => Ok(()),
        Some(_) => Err(D::Error::custom("recurrent_block is not supported; remove it")),
    }
}

fn encoder_class() -> String {
    "UNetEncoder".to_owned()
}

fn decoder_class() -> String {
    "UNetDecoder".to_owned()
}

fn encoder_channels() -> Vec<usize> {
    vec![16, 32, 64]
}

fn encoder_layers() -> Vec<usize> {
    vec![2, 2, 1]
}

fn decoder_channels() -> Vec<usize> {
    vec![64, 32, 16]
}

fn decoder_layers() -> Vec<usize> {
    vec![1, 2, 2]
}

fn one() -> usize {
    1
}

fn kernel_size() -> usize {
    3
}

fn pooling() -> usize {
    2
}
