//! Arguments of DhariwalUNet.

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DhariwalUNet, MODEL};
use crate::batch::Batch;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::layers::PerDim;
use crate::model::{Architecture, Model};
use crate::size::{built, extrapolate};
use crate::song_unet::{CLASS_LABELS, SongUNetConfig, Style};
use crate::traffic::{Split, Traffic};

/// Arguments of [`DhariwalUNet`](crate::DhariwalUNet), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DhariwalUNetConfig {
    /// Height and width of the fields, one number for both or `[height, width]`: multiples of 2^(levels − 1).
    pub img_resolution: PerDim,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Features of the class labels; 0 for none.
    #[serde(default)]
    pub label_dim: usize,
    /// Features of the augmentation labels; 0 for none.
    #[serde(default)]
    pub augment_dim: usize,
    /// Base number of channels; `channel_mult` and `channel_mult_emb` are multiples of it.
    #[serde(default = "model_channels")]
    pub model_channels: usize,
    /// Channels of each level, the finest first, in multiples of `model_channels`. Each level after the first halves the extents; at
    /// most 17 levels. Levels with attention, and the last one, need a multiple of 64 channels.
    #[serde(default = "channel_mult")]
    pub channel_mult: Vec<usize>,
    /// Width of the embedding of noise levels and labels, in multiples of `model_channels`.
    #[serde(default = "channel_mult_emb")]
    pub channel_mult_emb: usize,
    /// Residual blocks of each level on the way down; one more on the way up.
    #[serde(default = "num_blocks")]
    pub num_blocks: usize,
    /// Heights of the levels whose blocks have global attention.
    #[serde(default = "attn_resolutions")]
    pub attn_resolutions: Vec<usize>,
    /// Probability of dropout before the second convolution of a block.
    #[serde(default = "dropout")]
    pub dropout: f64,
    /// Probability in training that a sample's class labels are replaced by zeros.
    #[serde(default)]
    pub label_dropout: f64,
    /// Number of levels, from the finest, whose blocks recompute their activations in backward: less memory, about a third slower, same
    /// results.
    #[serde(default)]
    pub checkpoint_level: usize,
}

impl DhariwalUNetConfig {
    /// The defaults for fields of `img_resolution` `[height, width]` and the given channels.
    pub fn new(img_resolution: [usize; 2], in_channels: usize, out_channels: usize) -> Self {
        Self {
            img_resolution: PerDim::Each(img_resolution.to_vec()),
            in_channels,
            out_channels,
            label_dim: 0,
            augment_dim: 0,
            model_channels: model_channels(),
            channel_mult: channel_mult(),
            channel_mult_emb: channel_mult_emb(),
            num_blocks: num_blocks(),
            attn_resolutions: attn_resolutions(),
            dropout: dropout(),
            label_dropout: 0.0,
            checkpoint_level: 0,
        }
    }

    /// Returns the configuration of a SongUNet with these sizes.
    pub(crate) fn network(&self) -> SongUNetConfig {
        SongUNetConfig {
            img_resolution: self.img_resolution.clone(),
            label_dim: self.label_dim,
            augment_dim: self.augment_dim,
            model_channels: self.model_channels,
            channel_mult: self.channel_mult.clone(),
            channel_mult_emb: self.channel_mult_emb,
            num_blocks: self.num_blocks,
            attn_resolutions: self.attn_resolutions.clone(),
            dropout: self.dropout,
            label_dropout: self.label_dropout,
            checkpoint_level: self.checkpoint_level,
            ..SongUNetConfig::new([0; 2], self.in_channels, self.out_channels)
        }
    }
}

impl Architecture for DhariwalUNetConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("DhariwalUNet: the U-Net of ADM, whose embedding scales and shifts features.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        crate::song_unet::traffic(&self.network(), Style::Adm, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(DhariwalUNet::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "img_resolution", &self.img_resolution.list(2))?;
        fields.check_array(MODEL, Batch::<()>::TIME)?;
        if self.label_dim > 0 {
            fields.check_array(MODEL, CLASS_LABELS)?;
        }
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.num_blocks, 1, |num_blocks| {
            built(count, |params| DhariwalUNet::new(&Self { num_blocks, ..self.clone() }, params))
        })
    }
}

crate::register!(DhariwalUNetConfig);

fn model_channels() -> usize {
    192
}

fn channel_mult() -> Vec<usize> {
    vec![1, 2, 3, 4]
}

fn channel_mult_emb() -> usize {
    4
}

fn num_blocks() -> usize {
    3
}

fn attn_resolutions() -> Vec<usize> {
    vec![32, 16, 8]
}

fn dropout() -> f64 {
    0.1
}
