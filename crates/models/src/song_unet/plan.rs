//! Checked arguments, and the layout of the network that follows from them.

use isobar_nn::Functional;

use super::{EmbeddingType, MODEL, SongUNetConfig};
use crate::error::{Checker, Error, Result};
use crate::size::MOST_HALVINGS;

/// Most taps of the resampling filter.
const MOST_TAPS: usize = 64;

/// Most channels of the network, so that sizes of weights do not overflow.
const MOST_CHANNELS: usize = i32::MAX as usize;

/// Features of a head in ADM's attention.
const HEAD: i64 = 64;

/// Design of the blocks and the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Song et al.: the embedding is added.
    Song,
    /// ADM (Dhariwal and Nichol): the embedding scales and shifts.
    Adm,
}

impl Style {
    /// Name of the model of this style.
    pub(crate) const fn model(self) -> &'static str {
        match self {
            Self::Song => MODEL,
            Self::Adm => "dhariwal_unet",
        }
    }

    /// Added to variances.
    pub(super) fn eps(self) -> f64 {
        match self {
            Self::Song => 1e-6,
            Self::Adm => 1e-5,
        }
    }

    /// Returns the number of heads of attention over `channels` channels.
    pub(super) fn heads(self, channels: i64) -> i64 {
        match self {
            Self::Song => 1,
            Self::Adm => channels / HEAD,
        }
    }
}

/// Checked arguments.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) style: Style,
    /// Height and width.
    pub(super) extents: [i64; 2],
    pub(super) inputs: i64,
    pub(super) outputs: i64,
    /// Base number of channels.
    pub(super) width: i64,
    /// Channels of the levels, the finest first.
    pub(super) widths: Vec<i64>,
    /// Features of the embedding.
    pub(super) embedding: i64,
    /// Features of the noise level.
    pub(super) noise: i64,
    pub(super) labels: i64,
    pub(super) augmentations: i64,
    pub(super) act: Functional,
    /// Filter of the resamplings, along each dim; its sum is 1.
    pub(super) filter: Vec<f64>,
}

impl Plan {
    /// Channels of the first convolution: ADM's has those of the finest level.
    pub(super) fn first(&self) -> i64 {
        match self.style {
            Style::Song => self.width,
            Style::Adm => self.widths.first().copied().unwrap_or(self.width),
        }
    }

    pub(super) fn new(config: &SongUNetConfig, style: Style) -> Result<Self> {
        let model = style.model();
        let check = Checker(model);
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.out_channels)?;
        let width = check.extent("model_channels", config.model_channels)?;
        let times = |name: &str, factor: usize| -> Result<i64> {
            let product = config.model_channels.saturating_mul(factor);
            check.ensure((1..=MOST_CHANNELS).contains(&product), || {
                format!("model_channels · {name} is {product}, expected 1 to {MOST_CHANNELS}")
            })?;
            Ok(product as i64)
        };
        let levels = config.channel_mult.len();
        check.ensure((1..=MOST_HALVINGS + 1).contains(&levels), || {
            format!("channel_mult has {levels} levels, expected 1 to {}", MOST_HALVINGS + 1)
        })?;
        let widths: Vec<i64> =
            config.channel_mult.iter().map(|&factor| times("channel_mult", factor)).collect::<Result<_>>()?;
        let embedding = times("channel_mult_emb", config.channel_mult_emb)?;
        let noise = times("channel_mult_noise", config.channel_mult_noise)?;
        check_noise(&check, config.embedding_type, noise)?;
        let count = |name: &str, value: usize| -> Result<i64> {
            check.ensure(value <= MOST_CHANNELS, || {
                format!("{name} is {value}, expected at most {MOST_CHANNELS}")
            })?;
            Ok(value as i64)
        };
        let labels = count("label_dim", config.label_dim)?;
        let augmentations = count("augment_dim", config.augment_dim)?;
        check.probability("dropout", config.dropout)?;
        check.probability("label_dropout", config.label_dropout)?;
        let act = config.act.functional().ok_or_else(|| Error::Config {
            model,
            reason: format!("act is {:?}, expected a function without parameters, such as silu", config.act),
        })?;
        let filter = filter(&check, &config.resample_filter, levels)?;
        let extents = extents(&check, config, levels)?;
        let plan = Self {
            style,
            extents,
            inputs,
            outputs,
            width,
            widths,
            embedding,
            noise,
            labels,
            augmentations,
            act,
            filter,
        };
        for (level, &channels) in plan.widths.iter().enumerate() {
            let (heads, attends) =
                (style.heads(channels), plan.attends(config, level) || level + 1 == levels);
            check.ensure(!attends || (heads > 0 && channels % heads == 0), || {
                format!(
                    "attention of {channels} channels has heads of {HEAD}, expected a multiple of {HEAD}; choose model_channels and channel_mult \
                     so, or other attn_resolutions"
                )
            })?;
        }
        Ok(plan)
    }

    /// Returns whether the blocks of a level have attention.
    pub(super) fn attends(&self, config: &SongUNetConfig, level: usize) -> bool {
        let height = self.level(level);
        config.attn_resolutions.iter().any(|&resolution| resolution as i64 == height)
    }

    /// Name of a level in the state dict: its height, which stands for both extents.
    pub(super) fn level(&self, level: usize) -> i64 {
        self.extents[0] >> level
    }
}

/// Group norm takes groups of at least four channels, and at most 32 groups.
pub(super) fn groups(channels: i64, style: Style) -> Result<i64> {
    let groups = channels.div_euclid(4) + i64::from(channels % 4 > 0);
    let groups = groups.min(32);
    Checker(style.model()).ensure(channels % groups == 0, || {
        format!(
            "a group norm of {channels} channels would have {groups} groups, which do not divide them; choose model_channels and \
             channel_mult so that every level has a multiple of 32 channels, or of 4 up to 128"
        )
    })?;
    Ok(groups)
}

fn check_noise(check: &Checker, embedding: EmbeddingType, noise: i64) -> Result<()> {
    let least = match embedding {
        EmbeddingType::Positional => 4,
        EmbeddingType::Fourier => 2,
        EmbeddingType::Zero => return Ok(()),
    };
    check.ensure(noise >= least && noise % 2 == 0, || {
        format!(
            "model_channels · channel_mult_noise is {noise}, expected an even number of at least {least}: sines and cosines come in pairs"
        )
    })
}

fn filter(check: &Checker, taps: &[f64], levels: usize) -> Result<Vec<f64>> {
    let sum: f64 = taps.iter().sum();
    check.ensure(sum.is_finite() && sum != 0.0 && taps.len() <= MOST_TAPS, || {
        format!(
            "resample_filter is {taps:?}, expected at most {MOST_TAPS} taps whose sum is finite and not 0"
        )
    })?;
    check.ensure(levels == 1 || taps.len().is_multiple_of(2), || {
        format!("resample_filter {taps:?} has {} taps, expected an even number: an odd filter does not double the extents", taps.len())
    })?;
    Ok(taps.iter().map(|tap| tap / sum).collect())
}

fn extents(check: &Checker, config: &SongUNetConfig, levels: usize) -> Result<[i64; 2]> {
    let given = config.img_resolution.list(2);
    let multiple = 1 << (levels - 1);
    let fits = |&extent: &usize| extent > 0 && extent <= MOST_CHANNELS && extent.is_multiple_of(multiple);
    check.ensure(given.len() == 2 && given.iter().all(fits), || {
        format!("img_resolution is {given:?}, expected height and width, multiples of {multiple} for {levels} levels")
    })?;
    Ok([given[0] as i64, given[1] as i64])
}
