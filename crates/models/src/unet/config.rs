//! Arguments of the U-Net.

use std::collections::{BTreeMap, BTreeSet};

use isobar_array::{Array, Interpolation, PadMode};
use isobar_nn::{Activation, Functional};
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

use super::grid::{Grid, UNetPadding};
use super::{MODEL, UNet};
use crate::error::{Checker, Error, Result};
use crate::fields::FieldSpec;
use crate::layers::PerDim;
use crate::model::{Architecture, Model};
use crate::size::built;
use crate::traffic::{Split, Traffic};

/// Arguments of [`UNet`](crate::UNet), by PhysicsNeMo's names, and two more: `dimension` and `upsampling`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UNetConfig {
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Number of spatial dims, 2 or 3.
    #[serde(default = "dimension")]
    pub dimension: usize,
    /// Extent of the convolutions' kernels: a number for all spatial dims, or a list of one for each.
    #[serde(default = "kernel_size")]
    pub kernel_size: PerDim,
    /// Stride of the convolutions, given as `kernel_size`. With `padding = "same"`, only the encoder's convolutions are
    /// strided; a stride above 1 then requires `upsampling` `"nearest"` or `"linear"`, and the output has the extents of the input.
    /// With other paddings and several levels, the stride must be 1, except for very small fields.
    #[serde(default = "stride")]
    pub stride: PerDim,
    /// Number of levels.
    #[serde(default = "model_depth")]
    pub model_depth: usize,
    /// Channels of each convolution of the encoder; the decoder reads them backwards. With two in a level,
    /// the last two are equal.
    #[serde(default = "feature_map_channels")]
    pub feature_map_channels: Vec<usize>,
    /// Number of convolutions in a level, 1 or 2.
    #[serde(default = "num_conv_blocks")]
    pub num_conv_blocks: usize,
    /// The activation after convolutions: a function of `torch.nn.functional` that needs no further argument
    /// (its leaky ReLU has the slope 0.01), or `identity`.
    #[serde(default = "conv_activation", deserialize_with = "null_is_identity")]
    #[schemars(with = "Option<Activation>")]
    pub conv_activation: Activation,
    /// The activation after upsampling, one of the same.
    #[serde(default = "conv_transpose_activation", deserialize_with = "null_is_identity")]
    #[schemars(with = "Option<Activation>")]
    pub conv_transpose_activation: Activation,
    /// Padding of the convolutions, given as `kernel_size`. Half of an odd kernel, rounded down, keeps the extents
    /// at stride 1. `"same"` does so for even kernels too; with a stride s it maps n points to ⌈n / s⌉. Any other padding needs a single
    /// level and changes the extents of the output.
    #[serde(default = "padding")]
    pub padding: UNetPadding,
    /// Values of the padding. Transposed convolutions always pad with zeros.
    #[serde(default)]
    pub padding_mode: PaddingMode,
    /// Pooling from a level to the next lower one.
    #[serde(default)]
    pub pooling_type: Pooling,
    /// Extent of the pooling's windows; 2 with transposed convolutions.
    #[serde(default = "pool_size")]
    pub pool_size: usize,
    /// The normalisation after each convolution.
    #[serde(default = "normalization", deserialize_with = "null_is_none")]
    #[schemars(with = "Option<Normalization>")]
    pub normalization: Normalization,
    /// Arguments of the group norm; other norms ignore them.
    #[serde(default)]
    pub normalization_args: Option<NormalizationArgs>,
    /// Attention gates on the skip connections.
    #[serde(default)]
    pub use_attn_gate: bool,
    /// Channels that the gates get from below, the lowest first. They follow from `feature_map_channels`;
    /// given ones must agree.
    #[serde(default)]
    pub attn_decoder_feature_maps: Option<Vec<usize>>,
    /// Channels that pass the gates, the lowest first. They follow from `feature_map_channels`; given ones
    /// must agree.
    #[serde(default)]
    pub attn_feature_map_channels: Option<Vec<usize>>,
    /// Channels inside the gates; needed where there are some.
    #[serde(default)]
    pub attn_intermediate_channels: Option<usize>,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    /// PhysicsNeMo has it on.
    #[serde(default)]
    pub gradient_checkpointing: bool,
    /// Upsampling from a level to the one above. Transposed convolutions require extents that `pool_size` divides at each level.
    /// Interpolations accept any extents that leave a point on the lowest level.
    #[serde(default)]
    pub upsampling: Upsampling,
}

/// Padding of a convolution's input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PaddingMode {
    /// Zeros.
    #[default]
    Zeros,
    /// The elements mirrored at the last one, which comes once.
    Reflect,
    /// The last element.
    Replicate,
    /// The elements of the other end: the field is periodic.
    Circular,
}

/// Pooling of windows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Pooling {
    /// The mean.
    #[serde(rename = "AvgPool3d", alias = "AvgPool2d")]
    Avg,
    /// The maximum.
    #[default]
    #[serde(rename = "MaxPool3d", alias = "MaxPool2d")]
    Max,
}

/// Normalization of a convolution's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Normalization {
    /// Group norm, of one group unless `normalization_args` says otherwise.
    GroupNorm,
    /// Batch norm.
    BatchNorm,
    /// Layer norm over the channels at each point.
    LayerNorm,
    /// No normalisation.
    None,
}

/// Arguments of a group norm; other norms ignore them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("additionalProperties" = true))]
pub struct NormalizationArgs {
    /// Number of groups; it divides all of `feature_map_channels`.
    pub num_groups: usize,
    /// Number added to variances.
    pub eps: f64,
    /// True if each channel is then scaled by a trained weight and shifted by a trained bias.
    pub affine: bool,
    /// Number of channels, which follows from `feature_map_channels`: where it is given, all of these must be it.
    pub num_channels: Option<usize>,
    /// Names of further arguments. A group norm refuses them.
    #[serde(flatten, skip_serializing, deserialize_with = "names")]
    #[schemars(skip)]
    pub others: BTreeSet<String>,
}

/// Upsampling from a level to the one above.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Upsampling {
    /// A transposed convolution of kernel 3 and stride 2, as in PhysicsNeMo.
    #[default]
    Transposed,
    /// Nearest-neighbour interpolation by a factor of `pool_size`, or to the extents of the skip connection, followed by a
    /// convolution.
    Nearest,
    /// Linear interpolation between the elements' centres, and a convolution.
    Linear,
}

impl UNetConfig {
    /// The defaults for fields with the given channels.
    pub fn new(in_channels: usize, out_channels: usize) -> Self {
        Self {
            in_channels,
            out_channels,
            dimension: dimension(),
            kernel_size: kernel_size(),
            stride: stride(),
            model_depth: model_depth(),
            feature_map_channels: feature_map_channels(),
            num_conv_blocks: num_conv_blocks(),
            conv_activation: conv_activation(),
            conv_transpose_activation: conv_transpose_activation(),
            padding: padding(),
            padding_mode: PaddingMode::default(),
            pooling_type: Pooling::default(),
            pool_size: pool_size(),
            normalization: normalization(),
            normalization_args: None,
            use_attn_gate: false,
            attn_decoder_feature_maps: None,
            attn_feature_map_channels: None,
            attn_intermediate_channels: None,
            gradient_checkpointing: false,
            upsampling: Upsampling::default(),
        }
    }

    /// Checks that the model accepts fields of these spatial extents, without building it.
    ///
    /// # Errors
    ///
    /// Inconsistent arguments; extents that the levels do not divide, with a setting that fits.
    pub fn check_extents(&self, extents: &[usize]) -> Result<()> {
        let plan = self.plan()?;
        let check = Checker(MODEL);
        check.ensure(extents.len() == self.dimension, || {
            let dims = extents.len();
            format!(
                "dimension is {}, but the fields have {dims}; --set model.dimension={dims}",
                self.dimension
            )
        })?;
        let points: Vec<i64> =
            extents.iter().map(|&extent| i64::try_from(extent).unwrap_or(i64::MAX / 2)).collect();
        if !plan.grid.keeps_extents() {
            return check.ensure(plan.grid.output(&points).is_ok(), || {
                format!(
                    "fields of {extents:?} do not fit {}: {}; --set 'model.padding=\"same\"' --set model.stride=1",
                    plan.grid.describe(),
                    plan.grid.output(&points).err().unwrap_or_default()
                )
            });
        }
        let (depth, pool, grid) = (self.model_depth, self.pool_size, &plan.grid);
        check.ensure(grid.accepts(&points, depth), || {
            let fits = (1..depth).rev().find(|&less| grid.accepts(&points, less)).unwrap_or(1);
            let channels = &self.feature_map_channels[..fits * self.num_conv_blocks];
            format!(
                "model_depth {depth} pools fields of {extents:?} {} times by pool_size {pool}, expected {}; \
                 --set model.model_depth={fits} --set 'model.feature_map_channels={channels:?}'",
                depth - 1,
                grid.expected(plan.factor)
            )
        })
    }

    /// Checks the configuration, and returns the plan that does not depend on the parameters' names.
    pub(super) fn plan(&self) -> Result<Plan> {
        let check = Checker(MODEL);
        check.ensure(matches!(self.dimension, 2 | 3), || {
            format!("dimension is {}, expected 2 or 3", self.dimension)
        })?;
        check.ensure(matches!(self.num_conv_blocks, 1 | 2), || {
            format!("num_conv_blocks is {}, expected 1 or 2", self.num_conv_blocks)
        })?;
        let pool = check.extent("pool_size", self.pool_size)?;
        let grid = Grid::new(self, &check, pool, self.upsampling != Upsampling::Transposed)?;
        check.ensure(pool == 2 || self.upsampling != Upsampling::Transposed, || {
            format!("pool_size is {pool}, transposed convolutions need 2")
        })?;
        let depth = check.extent("model_depth", self.model_depth)?;
        // Divisor of a level's extents; larger ones do not fit any field.
        let factor = pool.checked_pow(depth as u32 - 1).filter(|&factor| factor <= i64::from(i32::MAX));
        let Some(factor) = factor else {
            return Err(refuse(format!("model_depth is {depth}, too many for pool_size {pool}")));
        };
        let group_norm = self.group_norm(&check)?;
        Ok(Plan {
            spatial: self.dimension,
            inputs: check.extent("in_channels", self.in_channels)?,
            outputs: check.extent("out_channels", self.out_channels)?,
            levels: self.levels(&check)?,
            grid,
            pool,
            factor,
            padding_mode: self.padding_mode.into(),
            activation: function("conv_activation", self.conv_activation)?,
            up_activation: function("conv_transpose_activation", self.conv_transpose_activation)?,
            group_norm,
        })
    }

    /// The channels of each convolution, level by level.
    fn levels(&self, check: &Checker) -> Result<Vec<Vec<i64>>> {
        let channels = &self.feature_map_channels;
        let (depth, count) = (self.model_depth, self.num_conv_blocks);
        check.ensure(channels.len() == depth * count, || {
            let wanted = depth * count;
            format!(
                "feature_map_channels has {} entries, expected model_depth · num_conv_blocks = {wanted}",
                channels.len()
            )
        })?;
        let extents: Vec<i64> = channels
            .iter()
            .map(|&channels| check.extent("an entry of feature_map_channels", channels))
            .collect::<Result<_>>()?;
        if let [.., before, last] = extents[..]
            && count == 2
        {
            check.ensure(before == last, || {
                format!(
                    "feature_map_channels ends in {before}, {last}; with two convolutions in a level these \
                     are equal"
                )
            })?;
        }
        Ok(extents.chunks(count).map(<[i64]>::to_vec).collect())
    }

    /// Returns the group norm, if there is one.
    fn group_norm(&self, check: &Checker) -> Result<GroupNorm> {
        let given =
            self.normalization_args.as_ref().filter(|_| self.normalization == Normalization::GroupNorm);
        let NormalizationArgs { num_groups, eps, affine, num_channels, others } =
            given.cloned().unwrap_or_default();
        check.ensure(others.is_empty(), || {
            format!("normalization_args has {others:?}, which groupnorm does not take here")
        })?;
        let groups = check.extent("num_groups", num_groups)?;
        check.ensure(eps >= 0.0, || format!("eps is {eps}, expected 0 or more"))?;
        let features = &self.feature_map_channels;
        for &channels in features {
            check
                .divisible(("an entry of feature_map_channels,", channels as i64), ("num_groups", groups))?;
        }
        if let Some(channels) = num_channels {
            check.ensure(features.iter().all(|&own| own == channels), || {
                format!("num_channels is {channels}, feature_map_channels are not all {channels}")
            })?;
        }
        Ok(GroupNorm { groups, eps, affine })
    }

    /// Channels inside the gates, which get `below` and let `skips` pass, where there are gates.
    pub(super) fn gates(&self, below: &[i64], skips: &[i64]) -> Result<Option<i64>> {
        let check = Checker(MODEL);
        let names = ["attn_decoder_feature_maps", "attn_feature_map_channels"];
        let given = [&self.attn_decoder_feature_maps, &self.attn_feature_map_channels];
        if !self.use_attn_gate {
            return Ok(None);
        }
        for ((name, given), own) in names.into_iter().zip(given).zip([below, skips]) {
            let agrees = |given: &Vec<usize>| {
                given.len() >= own.len() && given.iter().zip(own).all(|(&given, &own)| given as i64 == own)
            };
            check.ensure(given.as_ref().is_none_or(agrees), || {
                format!("{name} is {given:?}, by feature_map_channels it is {own:?}")
            })?;
        }
        let Some(inner) = self.attn_intermediate_channels else {
            return Err(refuse("use_attn_gate needs attn_intermediate_channels".into()));
        };
        check.extent("attn_intermediate_channels", inner).map(Some)
    }
}

impl Architecture for UNetConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some("U-Net.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(UNet::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_dimension(MODEL, self.dimension)?;
        fields.check_channels(
            MODEL,
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
        )?;
        self.check_extents(&fields.extents)?;
        let targets = fields.target_extents.as_ref().unwrap_or(&fields.extents);
        fields.check_outputs(MODEL, (&fields.extents, &self.output_extents(&fields.extents)), targets, || {
            "--set 'model.padding=\"same\"' --set model.stride=1 for outputs on the grid of the inputs"
                .to_owned()
        })
    }

    fn output_extents(&self, extents: &[usize]) -> Vec<usize> {
        let Ok(Plan { grid, .. }) = self.plan() else { return extents.to_vec() };
        if grid.keeps_extents() {
            return extents.to_vec();
        }
        let points: Vec<i64> =
            extents.iter().map(|&extent| i64::try_from(extent).unwrap_or(i64::MAX / 2)).collect();
        match grid.output(&points) {
            Ok(outputs) => outputs.into_iter().map(|extent| usize::try_from(extent).unwrap_or(0)).collect(),
            // Fields that do not fit are another error: see `check_extents`.
            Err(_) => extents.to_vec(),
        }
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        // Every level is listed in `feature_map_channels`.
        built(count, |params| UNet::new(self, params))
    }
}

crate::register!(UNetConfig);

/// Checked configuration.
pub(super) struct Plan {
    pub(super) spatial: usize,
    pub(super) inputs: i64,
    pub(super) outputs: i64,
    pub(super) levels: Vec<Vec<i64>>,
    pub(super) grid: Grid,
    pub(super) pool: i64,
    /// Required divisor of the field's extents.
    pub(super) factor: i64,
    pub(super) padding_mode: PadMode,
    pub(super) activation: Functional,
    pub(super) up_activation: Functional,
    pub(super) group_norm: GroupNorm,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct GroupNorm {
    pub(super) groups: i64,
    pub(super) eps: f64,
    /// True if it has a weight and a bias.
    pub(super) affine: bool,
}

fn refuse(reason: String) -> Error {
    Error::Config { model: MODEL, reason }
}

/// The function that an activation is here.
fn function(name: &str, activation: Activation) -> Result<Functional> {
    activation.functional().ok_or_else(|| {
        refuse(format!(
            "{name} is {activation:?}, which torch.nn.functional does not have, or not without arguments"
        ))
    })
}

impl From<PaddingMode> for PadMode {
    fn from(mode: PaddingMode) -> Self {
        match mode {
            PaddingMode::Zeros => Self::Constant,
            PaddingMode::Reflect => Self::Reflect,
            PaddingMode::Replicate => Self::Replicate,
            PaddingMode::Circular => Self::Circular,
        }
    }
}

impl Upsampling {
    /// Returns the interpolation, if there is one.
    pub(super) fn interpolation(self) -> Option<Interpolation> {
        match self {
            Self::Transposed => None,
            Self::Nearest => Some(Interpolation::Nearest),
            Self::Linear => Some(Interpolation::Linear),
        }
    }
}

impl Default for NormalizationArgs {
    fn default() -> Self {
        Self { num_groups: 1, eps: 1e-5, affine: true, num_channels: None, others: BTreeSet::new() }
    }
}

fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    Ok(BTreeMap::<String, IgnoredAny>::deserialize(deserializer)?.into_keys().collect())
}

/// PhysicsNeMo writes `None`.
fn null_is_identity<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Activation, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(Activation::Identity))
}

/// PhysicsNeMo writes `None`.
fn null_is_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Normalization, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(Normalization::None))
}

fn dimension() -> usize {
    3
}

fn kernel_size() -> PerDim {
    PerDim::All(3)
}

fn stride() -> PerDim {
    PerDim::All(1)
}

fn model_depth() -> usize {
    5
}

fn feature_map_channels() -> Vec<usize> {
    vec![64, 64, 128, 128, 256, 256, 512, 512, 1024, 1024]
}

fn num_conv_blocks() -> usize {
    2
}

fn conv_activation() -> Activation {
    Activation::Relu
}

fn conv_transpose_activation() -> Activation {
    Activation::Identity
}

fn padding() -> UNetPadding {
    PerDim::All(1).into()
}

fn pool_size() -> usize {
    2
}

fn normalization() -> Normalization {
    Normalization::GroupNorm
}
