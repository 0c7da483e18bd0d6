//! Arguments of SongUNet.

use isobar_array::Array;
use isobar_nn::Activation;
use isobar_shard::{ModelSize, ParamCount, ParameterLayouts, Placement, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::plan::{Plan, Style};
use super::{MODEL, SongUNet};
use crate::batch::Batch;
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::layers::PerDim;
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`SongUNet`](crate::SongUNet), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SongUNetConfig {
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
    /// Base number of channels; `channel_mult`, `channel_mult_emb` and `channel_mult_noise` are multiples of it.
    #[serde(default = "model_channels")]
    pub model_channels: usize,
    /// Channels of each level, the finest first, in multiples of `model_channels`. Each level after the first halves the extents; at
    /// most 17 levels.
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
    /// Embedding of the noise level.
    #[serde(default)]
    pub embedding_type: EmbeddingType,
    /// Features of the noise level before its layers, in multiples of `model_channels`.
    #[serde(default = "one")]
    pub channel_mult_noise: usize,
    /// Further paths from the input to each level.
    #[serde(default)]
    pub encoder_type: EncoderType,
    /// Further paths from each level to the output.
    #[serde(default)]
    pub decoder_type: DecoderType,
    /// Filter of the resamplings along each dim; an even number of taps, at most 64, whose sum is not 0.
    #[serde(default = "resample_filter")]
    pub resample_filter: Vec<f64>,
    /// Number of levels, from the finest, whose blocks recompute their activations in backward: less memory, about a third slower, same
    /// results.
    #[serde(default)]
    pub checkpoint_level: usize,
    /// Adds a trained field to the output of the first convolution.
    #[serde(default)]
    pub additive_pos_embed: bool,
    /// Adds global attention to the first block of the coarsest level on the way up.
    #[serde(default = "yes")]
    pub bottleneck_attention: bool,
    /// Activation after the group norms of blocks; a function of `torch.nn.functional` without parameters.
    #[serde(default = "act")]
    pub act: Activation,
    /// NVIDIA's kernel of group norms; no effect here.
    #[serde(default, skip_serializing_if = "is_off")]
    #[schemars(extend("default" = false))]
    pub use_apex_gn: bool,
    /// Ranges in a profiler's timeline; no effect here.
    #[serde(default, skip_serializing_if = "is_off")]
    #[schemars(extend("default" = false))]
    pub profile_mode: bool,
    /// Mixed precision within PhysicsNeMo's network; no effect here, where it is a setting of training.
    #[serde(default, skip_serializing_if = "is_off")]
    #[schemars(extend("default" = false))]
    pub amp_mode: bool,
}

/// Embedding of the noise level of SongUNet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EmbeddingType {
    /// Sines and cosines of the noise level times fixed frequencies, from 1 down to 1/10000 (DDPM++).
    #[default]
    Positional,
    /// Sines and cosines of the noise level times random frequencies (NCSN++).
    Fourier,
    /// No embedding: the output depends on the fields only, for regression.
    Zero,
}

/// Further paths from the input of SongUNet to its levels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EncoderType {
    /// None (DDPM++).
    #[default]
    Standard,
    /// Adds the downsampled input, by a linear map of the channels.
    Skip,
    /// Adds the convolved and downsampled features of the level above (NCSN++).
    Residual,
}

/// Further paths from the levels of SongUNet to its output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DecoderType {
    /// None: the finest level gives the output.
    #[default]
    Standard,
    /// Adds up outputs of all levels.
    Skip,
}

impl SongUNetConfig {
    /// The defaults (DDPM++) for fields of `img_resolution` `[height, width]` and the given channels.
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
            embedding_type: EmbeddingType::default(),
            channel_mult_noise: 1,
            encoder_type: EncoderType::default(),
            decoder_type: DecoderType::default(),
            resample_filter: resample_filter(),
            checkpoint_level: 0,
            additive_pos_embed: false,
            bottleneck_attention: true,
            act: act(),
            use_apex_gn: false,
            profile_mode: false,
            amp_mode: false,
        }
    }

    /// Checks that the network can compute on patches of `fields.patch_extents`, if given.
    pub(crate) fn check_patches(&self, model: &'static str, fields: &FieldSpec) -> Result<()> {
        let Some(patch) = &fields.patch_extents else { return Ok(()) };
        let own = self.img_resolution.list(2);
        let check = Checker(model);
        check.ensure(!self.additive_pos_embed || *patch == own, || {
            format!(
                "task.patches.patch_shape is {patch:?}, but with model.additive_pos_embed the network computes on {own:?} points only; \
                 --set model.additive_pos_embed=false"
            )
        })?;
        let levels = Plan::new(self, Style::Song)?.widths.len();
        let multiple = 1usize << (levels - 1);
        check.ensure(patch.iter().all(|extent| extent.is_multiple_of(multiple)), || {
            let fitting: Vec<usize> = patch.iter().map(|extent| extent.next_multiple_of(multiple)).collect();
            format!(
                "task.patches.patch_shape is {patch:?}, expected multiples of {multiple} for a network of {levels} levels; --set \
                 'task.patches.patch_shape={fitting:?}'"
            )
        })
    }
}

impl Architecture for SongUNetConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "SongUNet: the U-Net of diffusion models (DDPM++, NCSN++), or, with embedding_type = \"zero\", of plain regression.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, Style::Song, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(SongUNet::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        Plan::new(self, Style::Song)?;
        fields.check_extents(MODEL, "img_resolution", &self.img_resolution.list(2))?;
        if self.embedding_type != EmbeddingType::Zero {
            fields.check_array(MODEL, Batch::<()>::TIME)?;
        }
        if self.label_dim > 0 && self.embedding_type != EmbeddingType::Zero {
            fields.check_array(MODEL, super::model::CLASS_LABELS)?;
        }
        fields.check_channels(MODEL, ("in_channels", self.in_channels), ("out_channels", self.out_channels))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.num_blocks, 1, |num_blocks| {
            built(count, |params| SongUNet::new(&Self { num_blocks, ..self.clone() }, params))
        })
    }

    fn unread(&self) -> Vec<String> {
        let flags = [
            ("use_apex_gn", self.use_apex_gn),
            ("profile_mode", self.profile_mode),
            ("amp_mode", self.amp_mode),
        ];
        flags.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key.to_owned()).collect()
    }

    fn sharding(&self) -> Sharding {
        match self.additive_pos_embed {
            true => {
                let rows = [("domain", Placement::Shard(2))];
                Sharding::new().parameters(ParameterLayouts::new().with("spatial_emb", &rows))
            }
            false => Sharding::new(),
        }
    }
}

crate::register!(SongUNetConfig);

fn model_channels() -> usize {
    128
}

fn channel_mult() -> Vec<usize> {
    vec![1, 2, 2, 2]
}

fn channel_mult_emb() -> usize {
    4
}

fn num_blocks() -> usize {
    4
}

fn attn_resolutions() -> Vec<usize> {
    vec![16]
}

fn dropout() -> f64 {
    0.1
}

fn one() -> usize {
    1
}

fn resample_filter() -> Vec<f64> {
    vec![1.0, 1.0]
}

fn yes() -> bool {
    true
}

fn is_off(given: &bool) -> bool {
    !given
}

fn act() -> Activation {
    Activation::Silu
}
