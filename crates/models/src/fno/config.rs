//! Arguments of the Fourier Neural Operator.

use isobar_array::{Array, PadMode};
use isobar_nn::{Activation, Factorization};
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Fno, MODEL};
use crate::error::{Checker, Error, Result};
use crate::fields::FieldSpec;
use crate::layers::PerDim;
use crate::model::{Architecture, LargestArray, Model};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`Fno`](crate::Fno), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FnoConfig {
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Hidden layers of the decoder.
    #[serde(default = "one")]
    pub decoder_layers: usize,
    /// Width of the decoder's hidden layers.
    #[serde(default = "latent")]
    pub decoder_layer_size: usize,
    /// The activation of the decoder's hidden layers.
    #[serde(default = "silu")]
    pub decoder_activation_fn: Activation,
    /// Number of spatial dims, 1 to 4.
    #[serde(default = "two")]
    pub dimension: usize,
    /// Features at each point between the layers.
    #[serde(default = "latent")]
    pub latent_channels: usize,
    /// Number of Fourier layers.
    #[serde(default = "four")]
    pub num_fno_layers: usize,
    /// Fourier modes that are kept along each dim: a number for all, or a list, whose first `dimension` entries count. Along
    /// all dims but the last these are of the lowest frequencies of either sign, so twice as many.
    #[serde(default = "modes")]
    pub num_fno_modes: PerDim,
    /// Points that are put behind the end of each dim: a number for all, or a list, whose first `dimension` entries count and
    /// in which missing ones are 0.
    #[serde(default = "padding")]
    pub padding: PerDim,
    /// Values of the padding.
    #[serde(default)]
    pub padding_type: PaddingType,
    /// The activation between the Fourier layers.
    #[serde(default = "gelu")]
    pub activation_fn: Activation,
    /// Give the model each point's coordinates, from 0 to 1, as further channels.
    #[serde(default = "yes")]
    pub coord_features: bool,
    /// Factorization of spectral weights.
    #[serde(default)]
    pub factorization: Factorization,
    /// Parameters of a factored spectral weight, as a fraction of those of the whole one.
    #[serde(default = "whole")]
    pub rank: f64,
    /// Recomputes the activations of the Fourier layers in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

/// Padding behind the end of a field.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PaddingType {
    /// Zeros.
    #[default]
    Constant,
    /// The field mirrored at its last point, which comes once.
    Reflect,
    /// The last point.
    Replicate,
    /// The field from its beginning.
    Circular,
}

impl PaddingType {
    pub(super) fn mode(self) -> PadMode {
        match self {
            Self::Constant => PadMode::Constant,
            Self::Reflect => PadMode::Reflect,
            Self::Replicate => PadMode::Replicate,
            Self::Circular => PadMode::Circular,
        }
    }
}

impl FnoConfig {
    /// Checks that the model accepts fields of these spatial extents, without building it.
    ///
    /// # Errors
    ///
    /// Invalid arguments; more modes than points, or more padding than its type allows, with a setting that
    /// fits.
    pub fn check_extents(&self, extents: &[usize]) -> Result<()> {
        let (sizes, check) = (Sizes::new(self)?, Checker(MODEL));
        check.ensure(extents.len() == self.dimension, || {
            let dims = extents.len();
            format!(
                "dimension is {}, but the fields have {dims}; --set model.dimension={dims}",
                self.dimension
            )
        })?;
        let extents: Vec<i64> =
            extents.iter().map(|&extent| i64::try_from(extent).unwrap_or(i64::MAX)).collect();
        let Some((dim, misfit)) = sizes.misfit(self.padding_type.mode(), &extents) else { return Ok(()) };
        let (points, padding) = (extents[dim], sizes.padding[dim]);
        let set = |key: &str, given: &PerDim, most: &dyn Fn(usize) -> i64| {
            let mut values = given.list(self.dimension);
            values.resize(self.dimension, 0);
            let least = values.iter().enumerate().map(|(dim, &value)| value.min(most(dim) as usize));
            let values: Vec<usize> = least.collect();
            match given {
                PerDim::All(_) => format!("--set model.{key}={}", values.iter().min().unwrap_or(&1)),
                PerDim::Each(_) => format!("--set 'model.{key}={values:?}'"),
            }
        };
        let reason = match misfit {
            Misfit::Modes(_) => format!(
                "num_fno_modes is {} along dim {dim}, but a field of {points} points there, with {padding} of padding, has {} at \
                 most; {}",
                sizes.modes[dim],
                sizes.most_modes(dim, points),
                set("num_fno_modes", &self.num_fno_modes, &|dim| sizes.most_modes(dim, extents[dim]).max(1))
            ),
            Misfit::Padding(most) => format!(
                "padding is {padding} along dim {dim}, but of type {:?} it is {most} at most for a field of {points} points; {}",
                self.padding_type,
                set("padding", &self.padding, &|dim| widest(self.padding_type.mode(), extents[dim]).max(0))
            ),
        };
        Err(Error::Config { model: MODEL, reason })
    }

    /// The defaults for the given channels.
    pub fn new(in_channels: usize, out_channels: usize) -> Self {
        Self {
            in_channels,
            out_channels,
            decoder_layers: one(),
            decoder_layer_size: latent(),
            decoder_activation_fn: silu(),
            dimension: two(),
            latent_channels: latent(),
            num_fno_layers: four(),
            num_fno_modes: modes(),
            padding: padding(),
            padding_type: PaddingType::Constant,
            activation_fn: gelu(),
            coord_features: true,
            factorization: Factorization::None,
            rank: whole(),
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for FnoConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some("Fourier neural operator.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Fno::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_dimension(MODEL, self.dimension)?;
        fields.check_channels(
            MODEL,
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
        )?;
        self.check_extents(&fields.extents)
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.num_fno_layers, 1, |num_fno_layers| {
            extrapolate(self.decoder_layers, 1, |decoder_layers| {
                let config = Self { num_fno_layers, decoder_layers, ..self.clone() };
                built(count, |params| Fno::new(&config, params))
            })
        })
    }

    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray> {
        let dims = fields.extents.len();
        let mut padding = self.padding.list(dims);
        padding.resize(dims, 0);
        let padded =
            fields.extents.iter().zip(&padding).map(|(&extent, &points)| extent as u128 + points as u128);
        let points = padded.fold(1u128, u128::saturating_mul);
        let keys = match &self.padding {
            PerDim::All(points) => format!("model.padding = {points}"),
            PerDim::Each(points) => format!("model.padding = {points:?}"),
        };
        Some(LargestArray { elements: points.saturating_mul(self.latent_channels as u128), keys })
    }

    fn sharding(&self) -> Sharding {
        super::sharding::declare(self)
    }
}

crate::register!(FnoConfig);

fn one() -> usize {
    1
}

fn two() -> usize {
    2
}

fn four() -> usize {
    4
}

fn latent() -> usize {
    32
}

fn modes() -> PerDim {
    PerDim::All(16)
}

fn padding() -> PerDim {
    PerDim::All(8)
}

fn silu() -> Activation {
    Activation::Silu
}

fn gelu() -> Activation {
    Activation::Gelu
}

fn yes() -> bool {
    true
}

fn whole() -> f64 {
    1.0
}

/// The arguments, checked.
#[derive(Debug)]
pub(super) struct Sizes {
    pub(super) inputs: i64,
    pub(super) latent: i64,
    /// One for each spatial dim.
    pub(super) modes: Vec<i64>,
    pub(super) padding: Vec<i64>,
}

impl Sizes {
    pub(super) fn new(config: &FnoConfig) -> Result<Self> {
        let check = Checker(MODEL);
        let inputs = check.extent("in_channels", config.in_channels)?;
        check.extent("out_channels", config.out_channels)?;
        let latent = check.extent("latent_channels", config.latent_channels)?;
        check.ensure(latent >= 2, || "latent_channels is 1, expected 2 or more".into())?;
        let dims = config.dimension;
        check.ensure((1..=4).contains(&dims), || format!("dimension is {dims}, expected 1 to 4"))?;
        check.extent("num_fno_layers", config.num_fno_layers)?;
        // Of longer lists the rest does not count, as in PhysicsNeMo.
        let modes = config.num_fno_modes.list(dims);
        check.ensure(modes.len() >= dims && !modes[..dims].contains(&0), || {
            let mut works: Vec<usize> = modes.iter().map(|&modes| modes.max(1)).collect();
            works.resize(dims, 1);
            format!(
                "num_fno_modes is {modes:?}, expected 1 or more along each of {dims} dims (model.dimension); --set \
                 'model.num_fno_modes={works:?}'"
            )
        })?;
        let modes = modes.into_iter().take(dims);
        let modes = modes.map(|modes| check.extent("num_fno_modes", modes)).collect::<Result<_>>()?;
        let mut padding = config.padding.list(dims);
        padding.resize(dims, 0);
        let top = i32::MAX as usize;
        check.ensure(padding.iter().all(|&points| points <= top), || {
            format!("padding is {padding:?}, expected 0 to {top}")
        })?;
        let padding = padding.into_iter().map(|points| points as i64).collect();
        let stan = config.activation_fn == Activation::Stan;
        check.ensure(!stan, || "activation_fn stan works on one feature, between layers are more".into())?;
        let rank = config.rank;
        check.ensure(rank > 0.0 && rank <= 1.0, || format!("rank is {rank}, expected above 0, at most 1"))?;
        Ok(Self { inputs, latent, modes, padding })
    }
}

/// Reason why a model does not accept fields of some extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misfit {
    /// Too few points for the modes; the least that would do.
    Modes(i64),
    /// Too few points for the padding; the widest that would do.
    Padding(i64),
}

/// Returns the widest padding for this number of points.
fn widest(mode: PadMode, points: i64) -> i64 {
    match mode {
        PadMode::Reflect => points - 1,
        PadMode::Circular => points,
        _ => i64::MAX,
    }
}

impl Sizes {
    /// Returns the first dim of a field of these extents that does not fit, and the reason.
    pub(super) fn misfit(&self, mode: PadMode, extents: &[i64]) -> Option<(usize, Misfit)> {
        extents.iter().enumerate().find_map(|(dim, &extent)| {
            let (modes, padding) = (self.modes[dim], self.padding[dim]);
            if extent < 1 || modes > self.most_modes(dim, extent) {
                let least = if dim + 1 == self.modes.len() { (2 * (modes - 1)).max(1) } else { modes };
                return Some((dim, Misfit::Modes((least - padding).max(1))));
            }
            let most = widest(mode, extent);
            (padding > most).then_some((dim, Misfit::Padding(most)))
        })
    }

    /// Returns the largest number of modes along a dim of this many points.
    fn most_modes(&self, dim: usize, points: i64) -> i64 {
        let padded = points.saturating_add(self.padding[dim]);
        if dim + 1 == self.modes.len() { padded / 2 + 1 } else { padded }
    }
}
