//! Arguments of Pix2Pix.

use isobar_array::{Array, Conv, PadMode, Padding};
use isobar_nn::Activation;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{MODEL, Pix2Pix};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::size::{MOST_HALVINGS, built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`Pix2Pix`](crate::Pix2Pix), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pix2PixConfig {
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Number of spatial dims, 1 to 3.
    #[schemars(range(min = 1, max = 3))]
    pub dimension: usize,
    /// Channels after the first convolution; each downsampling doubles them.
    #[serde(default = "conv_layer_size")]
    pub conv_layer_size: usize,
    /// Downsamplings, each of which halves the extents; at most 16.
    #[serde(default = "samplings")]
    pub n_downsampling: usize,
    /// Upsamplings, each of which doubles the extents. More than `n_downsampling` make the output finer than the input; fewer have no
    /// effect. At most 16.
    #[serde(default = "samplings")]
    pub n_upsampling: usize,
    /// Number of residual blocks.
    #[serde(default = "n_blocks")]
    pub n_blocks: usize,
    /// Activation after every convolution but the last; one module is shared by all. Any but `stan`.
    #[serde(default = "activation_fn")]
    pub activation_fn: Activation,
    /// Adds a batch norm before each activation and at the end of each residual block.
    #[serde(default)]
    pub batch_norm: bool,
    /// Values of the padding in residual blocks. The first and the last convolution pad by reflection.
    #[serde(default)]
    pub padding_type: Pix2PixPadding,
    /// Recomputes the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

/// Padding in residual blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pix2PixPadding {
    /// Mirrors the field about its last point, which is not repeated.
    #[default]
    Reflect,
    /// Repeats the last point.
    Replicate,
    /// Zeros.
    Zero,
}

impl Pix2PixPadding {
    /// Number of modules of a state dict that the padding takes in front of a convolution.
    pub(super) fn modules(self) -> usize {
        usize::from(self != Self::Zero)
    }

    /// A convolution with kernels of 3 that keeps the extents.
    pub(super) fn conv(self) -> Conv {
        let padding_mode = match self {
            Self::Reflect => PadMode::Reflect,
            Self::Replicate => PadMode::Replicate,
            Self::Zero => PadMode::Constant,
        };
        Conv { padding: Padding::Each(vec![1]), padding_mode, ..Conv::default() }
    }
}

impl Pix2PixConfig {
    /// The defaults for fields with the given channels and number of spatial dims.
    pub fn new(in_channels: usize, out_channels: usize, dimension: usize) -> Self {
        Self {
            in_channels,
            out_channels,
            dimension,
            conv_layer_size: conv_layer_size(),
            n_downsampling: samplings(),
            n_upsampling: samplings(),
            n_blocks: n_blocks(),
            activation_fn: activation_fn(),
            batch_norm: false,
            padding_type: Pix2PixPadding::default(),
            gradient_checkpointing: false,
        }
    }

    /// Rejects numbers of samplings that no grid has.
    pub(super) fn check_samplings(&self) -> Result<()> {
        for (name, count) in [("n_downsampling", self.n_downsampling), ("n_upsampling", self.n_upsampling)] {
            Checker(MODEL).ensure(count <= MOST_HALVINGS, || {
                format!("{name} is {count}, expected at most {MOST_HALVINGS}; --set model.{name}=3")
            })?;
        }
        Ok(())
    }

    /// Fewest points of the input along a dim, with so many downsamplings.
    fn least(&self, downsamplings: usize) -> usize {
        // A field is reflected about its last point, on the coarsest grid by one point and on the finest by three.
        let reflects = self.padding_type == Pix2PixPadding::Reflect && self.n_blocks > 0;
        usize::max(4, usize::from(reflects) << (downsamplings + 1))
    }

    /// Returns whether so many downsamplings fit inputs that are the data, coarsened so many times by a factor of 2.
    fn fits(&self, downsamplings: usize, extents: &[usize], finer: usize) -> bool {
        extents.iter().all(|&extent| {
            extent.is_multiple_of(1 << (downsamplings + finer))
                && extent >> finer >= self.least(downsamplings)
        })
    }

    /// Upsamplings beyond the grid of the input.
    pub(super) fn further(&self) -> usize {
        self.n_upsampling.saturating_sub(self.n_downsampling)
    }
}

impl Architecture for Pix2PixConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "Pix2Pix: convolutions down to a coarser grid, residual blocks, and transposed convolutions back.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Pix2Pix::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_dimension(MODEL, self.dimension)?;
        self.check_samplings()?;
        let extents = &fields.extents;
        let outputs: Vec<usize> =
            extents.iter().map(|extent| extent.saturating_mul(self.refinement())).collect();
        fields.check_target_extents(MODEL, &outputs, |_| match fields.target_scale() {
            Some(scale) if scale.is_power_of_two() => {
                format!("--set model.n_upsampling={}", self.n_downsampling + scale.ilog2() as usize)
            }
            _ => "targets of 1, 2, 4, … times the points along each dim are needed".to_owned(),
        })?;
        // Where the outputs' grid is finer and the targets share that of the data, the inputs are the data, coarsened.
        let coarser = if fields.target_extents.is_some() { 0 } else { self.further() };
        Checker(MODEL).ensure(self.fits(self.n_downsampling, extents, coarser), || {
            let fewer = (0..self.n_downsampling).rev().find(|&fewer| self.fits(fewer, extents, coarser));
            let mend = match fewer {
                Some(n) => format!(
                    "--set model.n_downsampling={n} --set model.n_upsampling={}",
                    n + self.further()
                ),
                None => "fields of other extents are needed".to_owned(),
            };
            format!(
                "the fields of {} are {extents:?}, but n_downsampling = {} and n_upsampling = {} need multiples of {}, at least {}; {mend}",
                fields.source,
                self.n_downsampling,
                self.n_upsampling,
                1_u64 << (self.n_downsampling + coarser),
                self.least(self.n_downsampling) << coarser
            )
        })?;
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.n_blocks, 1, |n_blocks| {
            built(count, |params| Pix2Pix::new(&Self { n_blocks, ..self.clone() }, params))
        })
    }

    fn refinement(&self) -> usize {
        1 << self.further().min(MOST_HALVINGS)
    }
}

crate::register!(Pix2PixConfig);

fn conv_layer_size() -> usize {
    64
}

fn samplings() -> usize {
    3
}

fn n_blocks() -> usize {
    3
}

fn activation_fn() -> Activation {
    Activation::Relu
}
