//! Arguments of the plain convolutional network.

use isobar_array::Array;
use isobar_nn::Activation;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConvNet, MODEL};
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};
use crate::unet::PaddingMode;

/// Arguments of [`ConvNet`](crate::ConvNet).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConvNetConfig {
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Number of spatial dims, 1 to 3.
    #[serde(default = "dimension")]
    pub dimension: usize,
    /// Channels between the convolutions.
    #[serde(default = "hidden_channels")]
    pub hidden_channels: usize,
    /// Number of hidden layers: one less than there are convolutions.
    #[serde(default = "depth")]
    pub depth: usize,
    /// Extent of the kernels, an odd number.
    #[serde(default = "kernel_size")]
    pub kernel_size: usize,
    /// The activation after all convolutions but the last.
    #[serde(default = "activation_fn")]
    pub activation_fn: Activation,
    /// Padding that keeps the extents; `circular` for periodic fields.
    #[serde(default)]
    pub padding_mode: PaddingMode,
    /// Recompute the activations of the hidden layers in backward: less memory, about a third more time, the same
    /// numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl ConvNetConfig {
    /// The defaults for fields of `dimension` spatial dims with the given channels.
    pub fn new(in_channels: usize, out_channels: usize, dimension: usize) -> Self {
        Self {
            in_channels,
            out_channels,
            dimension,
            hidden_channels: hidden_channels(),
            depth: depth(),
            kernel_size: kernel_size(),
            activation_fn: activation_fn(),
            padding_mode: PaddingMode::default(),
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for ConvNetConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("Convolutions with activations between, at the resolution of the fields: the baseline.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        Some(super::traffic::of(self, split))
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(ConvNet::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_dimension(MODEL, self.dimension)?;
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.depth, 1, |depth| {
            built(count, |params| ConvNet::new(&Self { depth, ..self.clone() }, params))
        })
    }
}

crate::register!(ConvNetConfig);

fn dimension() -> usize {
    2
}

fn hidden_channels() -> usize {
    32
}

fn depth() -> usize {
    10
}

fn kernel_size() -> usize {
    3
}

fn activation_fn() -> Activation {
    Activation::Relu
}
