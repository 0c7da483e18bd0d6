//! Arguments of the super-resolution residual network.

use isobar_array::Array;
use isobar_nn::Activation;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{MODEL, SPATIAL, SrResNet, TAKES_EVEN};
use crate::error::Checker;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`SrResNet`](crate::SrResNet), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SrResNetConfig {
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Extent of the first and the last kernel; for training an odd number unless `padding` is `same`.
    #[serde(default = "large_kernel_size")]
    pub large_kernel_size: usize,
    /// Extent of the other kernels, an odd number unless `padding` is `same`.
    #[serde(default = "small_kernel_size")]
    pub small_kernel_size: usize,
    /// Padding of the convolutions with zeros.
    #[serde(default)]
    pub padding: SrResNetPadding,
    /// Channels between.
    #[serde(default = "conv_layer_size")]
    pub conv_layer_size: usize,
    /// Number of residual blocks.
    #[serde(default = "n_resid_blocks")]
    pub n_resid_blocks: usize,
    /// The output's extents, in those of the input: 2, 4 or 8.
    #[serde(default = "scaling_factor")]
    pub scaling_factor: usize,
    /// The activation of the first convolution and of the residual blocks, one for all; any but `stan`.
    #[serde(default = "activation_fn")]
    pub activation_fn: Activation,
    /// Recompute the activations of the residual blocks in backward: less memory, about a third more time, the same
    /// numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

/// Padding of convolutions with zeros.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SrResNetPadding {
    /// Half of the kernel, rounded down, on both sides, as in PhysicsNeMo: odd kernels keep the extents. An even
    /// `large_kernel_size` adds a point along each dim; an even `small_kernel_size` is an error.
    #[default]
    Half,
    /// As many elements as keep the extents; of an odd number, the extra one comes at the end.
    Same,
}

impl SrResNetConfig {
    /// The defaults for fields with the given channels.
    pub fn new(in_channels: usize, out_channels: usize) -> Self {
        Self {
            in_channels,
            out_channels,
            large_kernel_size: large_kernel_size(),
            small_kernel_size: small_kernel_size(),
            padding: SrResNetPadding::default(),
            conv_layer_size: conv_layer_size(),
            n_resid_blocks: n_resid_blocks(),
            scaling_factor: scaling_factor(),
            activation_fn: activation_fn(),
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for SrResNetConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("Super-resolution residual network of three dimensions: its outputs are on a finer grid.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(SrResNet::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_dimension(MODEL, SPATIAL)?;
        let large = self.large_kernel_size;
        Checker(MODEL).ensure(large % 2 == 1 || self.padding == SrResNetPadding::Same, || {
            format!(
                "large_kernel_size is {large}, which gives more points than the targets have; {TAKES_EVEN}"
            )
        })?;
        let (factor, extents) = (self.scaling_factor.max(1), &fields.extents);
        let outputs: Vec<usize> = extents.iter().map(|extent| extent.saturating_mul(factor)).collect();
        fields.check_target_extents(MODEL, &outputs, |_| match fields.target_scale() {
            Some(fits @ (2 | 4 | 8)) => format!("--set model.scaling_factor={fits}"),
            _ => "targets of 2, 4 or 8 times the points along each dim are needed".to_owned(),
        })?;
        let is_coarsened = fields.target_extents.is_none();
        let fits = |factor: usize| !is_coarsened || extents.iter().all(|extent| extent % factor == 0);
        Checker(MODEL).ensure(fits(factor), || {
            let fits = [8, 4, 2].into_iter().find(|&factor| fits(factor));
            let setting = fits.map_or_else(
                || "fields of even extents are needed".to_owned(),
                |fits| format!("--set model.scaling_factor={fits}"),
            );
            format!(
                "scaling_factor is {factor}, but the fields of {} are {extents:?}; {setting}",
                fields.source
            )
        })?;
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.n_resid_blocks, 1, |n_resid_blocks| {
            built(count, |params| SrResNet::new(&Self { n_resid_blocks, ..self.clone() }, params))
        })
    }

    fn refinement(&self) -> usize {
        self.scaling_factor
    }
}

crate::register!(SrResNetConfig);

fn large_kernel_size() -> usize {
    7
}

fn small_kernel_size() -> usize {
    3
}

fn conv_layer_size() -> usize {
    32
}

fn n_resid_blocks() -> usize {
    8
}

fn scaling_factor() -> usize {
    8
}

fn activation_fn() -> Activation {
    Activation::Prelu
}
