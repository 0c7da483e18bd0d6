//! Weights of a run's loss and metrics: of variables, levels, latitudes and lead times, and masks. Knows no layout of fields.

use std::collections::BTreeMap;
use std::ops::Range;

use isobar_array::Array;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, TchError, Tensor};

use crate::error::{Context, Error, Result};
use crate::loss::{LossKind, Weighting};
use crate::variables::Variable;

/// `[train.weights]`: weights of the loss. Those of variables, of points and of steps are divided by their mean, so that the loss
/// keeps its scale.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WeightsConfig {
    /// Weights of variables, 0 or more, by name: of a channel (`velocity_x`), or of all channels of a variable of the data
    /// (`velocity`). Others have the weight 1. For example `{ u = 2.0 }`.
    pub variables: BTreeMap<String, f64>,
    /// Weights of levels, 0 or more, by the number that ends the names of their channels (`z_500`). Others have the weight 1. For
    /// example `{ "500" = 2.0 }`. Multiplied by the weights of variables.
    pub levels: BTreeMap<String, f64>,
    /// Weights points by the cosine of their latitude, the area of their cells, in the loss and in `metrics.report`. The data need
    /// a spatial dim of latitudes. Losses of Fourier modes (`sobolev`, `spectral`) have no points: in a sum they leave these weights
    /// out.
    pub latitude: bool,
    /// Weights of the steps of a training sample (`data.train_steps`): a list with one for each step, 0 or more; or the factor from
    /// each step to the next. By default all count alike.
    pub lead: Option<Lead>,
    /// Weight of the model's regularization term in the loss, 0 or more. Most models have none; `geo_transolver` has one with
    /// `concrete_dropout`.
    pub regularization: f64,
}

impl Default for WeightsConfig {
    fn default() -> Self {
        Self {
            variables: BTreeMap::new(),
            levels: BTreeMap::new(),
            latitude: false,
            lead: None,
            regularization: 0.001,
        }
    }
}

/// Weights of lead times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Lead {
    /// Factor from each step to the next.
    Decay(f64),
    /// Weight of each step.
    Steps(Vec<f64>),
}

impl WeightsConfig {
    /// Checks that weights are in their ranges, and that the loss takes them.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the first setting that cannot work.
    pub fn check(&self, loss: &LossKind) -> Result<()> {
        for (key, weights) in [("variables", &self.variables), ("levels", &self.levels)] {
            let wrong = weights.iter().find(|(_, weight)| !(weight.is_finite() && **weight >= 0.0));
            if let Some((name, weight)) = wrong {
                let key = format!("train.weights.{key}.{name}");
                return Err(Error::setting(&key, weight, "a finite number, 0 or more", "1.0"));
            }
        }
        if !(self.regularization.is_finite() && self.regularization >= 0.0) {
            let (key, expected) = ("train.weights.regularization", "a finite number, 0 or more");
            return Err(Error::setting(key, self.regularization, expected, "0.001"));
        }
        match &self.lead {
            Some(Lead::Decay(factor)) if !(factor.is_finite() && *factor > 0.0) => {
                let expected = "a finite factor above 0 from each step to the next";
                return Err(Error::setting("train.weights.lead", factor, expected, "0.9"));
            }
            Some(Lead::Steps(steps))
                if !steps.iter().all(|weight| weight.is_finite() && *weight >= 0.0)
                    || steps.iter().sum::<f64>() <= 0.0 =>
            {
                let expected = "finite weights of 0 or more, one above 0";
                return Err(Error::setting("train.weights.lead", format!("{steps:?}"), expected, "[1.0]"));
            }
            _ => {}
        }
        let support = loss.support();
        let by_channel = !self.variables.is_empty() || !self.levels.is_empty();
        if by_channel && !support.channels {
            return Err(untaken(loss, "variables or levels", "--set 'train.weights.variables={}'"));
        }
        if !support.points && self.latitude {
            return Err(untaken(loss, "latitude", "--set train.weights.latitude=false"));
        }
        Ok(())
    }

    /// Checks that each step of a training sample has a weight, and that one of the first is above 0 where samples have the `least`
    /// steps of a schedule.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for weights that cannot work.
    pub fn check_steps(&self, least: usize, most: usize) -> Result<()> {
        let Some(Lead::Steps(weights)) = &self.lead else { return Ok(()) };
        let expected = if weights.len() < most {
            format!("one weight for each of the {most} steps of data.train_steps")
        } else if weights.iter().take(least).sum::<f64>() <= 0.0 {
            format!("a weight above 0 among the first {least}, the fewest steps of data.train_steps")
        } else {
            return Ok(());
        };
        let works = format!("{:?}", vec![1.0; most]);
        Err(Error::setting("train.weights.lead", format!("{weights:?}"), &expected, works))
    }

    /// Returns whether more steps have weights than a training sample has.
    pub fn has_surplus_steps(&self, steps: usize) -> bool {
        matches!(&self.lead, Some(Lead::Steps(weights)) if weights.len() > steps)
    }
}

fn untaken(loss: &LossKind, what: &str, mend: &str) -> Error {
    let found = format!("{:?}, which takes no weights of {what}", loss.name());
    let expected = format!("a loss that takes them, such as --set train.loss=mse; or {mend}");
    Error::invalid("train.loss", found, expected)
}

/// Latitudes of the points along a spatial dim of the fields.
#[derive(Debug, Clone, PartialEq)]
pub struct Latitudes {
    /// The spatial dim; 0 is the first after `[sample, channel]`.
    pub dim: usize,
    /// Latitude of each point of the full field, in degrees north.
    pub degrees: Vec<f64>,
}

/// Weights of a run, of this rank's window of the fields. The default weights all alike.
///
/// ```
/// use isobar_train::{Latitudes, Variable, Weights, WeightsConfig};
/// use tch::{Device, Kind, Tensor};
///
/// // A rank with the last two of three rows, from 60° S to 60° N.
/// let latitudes = Latitudes { dim: 0, degrees: vec![-60.0, 0.0, 60.0] };
/// let config = WeightsConfig { latitude: true, ..WeightsConfig::default() };
/// let weights = Weights::new(&config, &[Variable::new("h")], Some(&latitudes), &[1..3, 0..4])?;
/// let fields = Tensor::ones([1, 1, 2, 4], (Kind::Double, Device::Cpu));
/// let weighting = weights.of_fields(&fields, &fields, None, |window| Ok::<_, isobar_train::Error>(window.shallow_clone()))?;
/// let weighted = weighting.point_means(&fields)?.double_value(&[0, 0]);
/// assert!((weighted - (1.5 + 0.75) / 2.0).abs() < 1e-15);
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Debug)]
pub struct Weights {
    /// Of each channel, of mean one; empty if all count alike.
    channels: Vec<f64>,
    /// Of points, `[spatial…]` with extents 1 along dims without latitudes.
    area: Option<Tensor>,
    /// Points that count, `[channel, spatial…]` or `[1, spatial…]`.
    mask: Option<Tensor>,
    lead: Option<Lead>,
    regularization: f64,
}

impl Default for Weights {
    fn default() -> Self {
        let WeightsConfig { lead, regularization, .. } = WeightsConfig::default();
        Self { channels: Vec::new(), area: None, mask: None, lead, regularization }
    }
}

impl Weights {
    /// Makes the weights of this rank's `window` of fields with these variables, one for each channel. Communicates nothing.
    ///
    /// # Errors
    ///
    /// Names or levels that no channel has; weights that are all 0; latitudes that are asked for and missing or out of range.
    pub fn new(
        config: &WeightsConfig,
        variables: &[Variable],
        latitudes: Option<&Latitudes>,
        window: &[Range<usize>],
    ) -> Result<Self> {
        let area = match (config.latitude, latitudes) {
            (false, _) => None,
            (true, Some(latitudes)) => Some(area(latitudes, window)?),
            (true, None) => {
                let expected =
                    "false, as the fields have no dim of latitudes; --set train.weights.latitude=false";
                return Err(Error::invalid("train.weights.latitude", true, expected));
            }
        };
        let (lead, regularization) = (config.lead.clone(), config.regularization);
        Ok(Self { channels: channels(config, variables)?, area, mask: None, lead, regularization })
    }

    /// Adds a mask of the points that count: boolean, this rank's window `[channel, spatial…]`, or `[1, spatial…]` for all channels.
    #[must_use]
    pub fn with_mask(self, mask: Tensor) -> Self {
        Self { mask: Some(mask), ..self }
    }

    /// Returns the weights in the layout of `fields`, of which `local` is this rank's window of its own samples, `[sample, channel,
    /// spatial…]`. `present` masks elements of these samples besides, of the shape of `local` or one that expands to it. `lay_out`
    /// makes an array of a window of this rank's samples. Communicates nothing.
    ///
    /// # Errors
    ///
    /// Windows of another shape than `local`; those of `lay_out`.
    pub fn of_fields<A: Array, E: From<Error>>(
        &self,
        fields: &A,
        local: &Tensor,
        present: Option<&Tensor>,
        lay_out: impl Fn(&Tensor) -> Result<A, E>,
    ) -> Result<Weighting<A>, E> {
        let mut weighting = Weighting::default();
        if !self.channels.is_empty() {
            let channels = self.along_channels(local).context(|| "weights of channels".to_owned())?;
            let channels = fields.constant(&channels).map_err(Error::from)?;
            weighting = weighting.with_channels(channels);
        }
        if let Some(area) = &self.area {
            let area = area_of(area, local).context(|| "weights of latitudes".to_owned())?;
            weighting = weighting.with_area(lay_out(&area)?);
        }
        if let Some(mask) = mask_of(self.mask.as_ref(), present, local).context(|| "a mask".to_owned())? {
            weighting = weighting.with_mask(lay_out(&mask)?);
        }
        Ok(weighting)
    }

    fn along_channels(&self, local: &Tensor) -> Result<Tensor, TchError> {
        let mut view = vec![1; local.dim()];
        if let Some(extent) = view.get_mut(1) {
            *extent = -1;
        }
        Tensor::f_from_slice(&self.channels)?.f_view(&view[..])?.f_to_kind(local.kind())
    }

    /// Computes the weighted mean of the losses of each step.
    ///
    /// # Errors
    ///
    /// More steps than weights.
    pub fn over_steps<A: Array>(&self, losses: &[A]) -> Result<A> {
        let all = A::stack(&losses.iter().collect::<Vec<_>>(), 0)?;
        let weights: Vec<f64> = match &self.lead {
            None => return Ok(all.mean()?),
            Some(Lead::Decay(factor)) => (0..losses.len()).map(|step| factor.powi(step as i32)).collect(),
            Some(Lead::Steps(steps)) => match steps.get(..losses.len()) {
                Some(steps) => steps.to_vec(),
                None => {
                    let expected = format!("a weight for each of {} steps", losses.len());
                    return Err(Error::invalid("train.weights.lead", format!("{steps:?}"), expected));
                }
            },
        };
        let constant = |numbers: &[f64]| -> Result<A> {
            let numbers = Tensor::f_from_slice(numbers).and_then(|numbers| numbers.f_to_kind(all.kind()));
            Ok(all.constant(&numbers.context(|| "weights of lead times".to_owned())?)?)
        };
        let total = constant(&[weights.iter().sum()])?;
        Ok(all.mul(&constant(&weights)?)?.sum()?.div(&total.sum()?)?)
    }

    /// Returns the weight of a model's [regularization](isobar_models::Model::regularization).
    pub(crate) fn regularization(&self) -> f64 {
        self.regularization
    }
}

/// Weights of channels, of mean one; empty if all count alike.
fn channels(config: &WeightsConfig, variables: &[Variable]) -> Result<Vec<f64>> {
    if config.variables.is_empty() && config.levels.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<&str> = variables.iter().map(|variable| &*variable.name).collect();
    for (key, found) in [
        (
            "variables",
            config.variables.keys().find(|key| !variables.iter().any(|variable| is_of(variable, key))),
        ),
        ("levels", config.levels.keys().find(|key| !names.iter().any(|name| level(name) == key.as_str()))),
    ] {
        if let Some(unknown) = found {
            let key = format!("train.weights.{key}");
            return Err(Error::invalid(
                &key,
                format!("a weight of {unknown:?}"),
                format!(
                    "weights of these channels, of their variables or levels: {names:?}; --set '{key}={{}}' for none"
                ),
            ));
        }
    }
    let weight = |variable: &Variable| {
        // A channel's own weight counts before its variable's.
        let whole = variable.part_of.as_ref().and_then(|name| config.variables.get(name));
        let own = config.variables.get(&variable.name).or(whole).copied().unwrap_or(1.0);
        own * config.levels.get(level(&variable.name)).copied().unwrap_or(1.0)
    };
    let weights: Vec<f64> = variables.iter().map(weight).collect();
    let mean = weights.iter().sum::<f64>() / weights.len() as f64;
    if mean > 0.0 && mean.is_finite() {
        return Ok(weights.iter().map(|weight| weight / mean).collect());
    }
    let expected = "one above 0; --set 'train.weights.variables={}'";
    Err(Error::invalid("train.weights", format!("weights {weights:?} of the channels {names:?}"), expected))
}

/// Returns whether `key` names a channel, or the variable that it is a component or level of.
fn is_of(variable: &Variable, key: &str) -> bool {
    variable.name == key || variable.part_of.as_deref() == Some(key)
}

/// Returns the number that ends a channel's name; empty for none.
fn level(channel: &str) -> &str {
    let letters = channel.trim_end_matches(|letter: char| letter.is_ascii_digit() || letter == '.');
    &channel[letters.len()..]
}

/// cos φ of mean one over all latitudes, of a window's rows.
fn area(latitudes: &Latitudes, window: &[Range<usize>]) -> Result<Tensor> {
    let Latitudes { dim, degrees } = latitudes;
    if let Some(wrong) = degrees.iter().find(|degrees| !(-90.001..=90.001).contains(*degrees)) {
        let expected = "degrees from -90 to 90; --set train.weights.latitude=false";
        return Err(Error::invalid("a latitude of the fields", wrong, expected));
    }
    let cosines: Vec<f64> = degrees.iter().map(|degrees| degrees.to_radians().cos().max(0.0)).collect();
    let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
    let rows = window.get(*dim).and_then(|rows| cosines.get(rows.clone()));
    let (Some(rows), true) = (rows, mean > 0.0) else {
        let found = format!("{} of them, along spatial dim {dim}", degrees.len());
        return Err(Error::invalid(
            "the latitudes of fields",
            found,
            format!("those of the window {window:?}"),
        ));
    };
    let rows: Vec<f64> = rows.iter().map(|cosine| cosine / mean).collect();
    let mut view = vec![1; window.len()];
    view[*dim] = rows.len() as i64;
    Tensor::f_from_slice(&rows)
        .and_then(|rows| rows.f_view(&view[..]))
        .context(|| "weights of latitudes".to_owned())
}

/// Weights `[spatial…]` of the samples of a window: `[sample, 1, spatial…]`.
fn area_of(area: &Tensor, local: &Tensor) -> Result<Tensor, TchError> {
    let mut shape = local.size();
    if let Some(channels) = shape.get_mut(1) {
        *channels = 1;
    }
    let area = area.f_to_kind(local.kind())?.f_to_device(local.device())?;
    area.f_unsqueeze(0)?.f_unsqueeze(0)?.f_expand(&shape, false)
}

/// The points of a window's samples that count, by both masks: `[sample, channel, spatial…]`.
fn mask_of(
    mask: Option<&Tensor>,
    present: Option<&Tensor>,
    local: &Tensor,
) -> Result<Option<Tensor>, TchError> {
    let boolean = |mask: &Tensor| mask.f_to_kind(Kind::Bool)?.f_to_device(local.device());
    let mask = mask.map(|mask| boolean(&mask.f_unsqueeze(0)?)).transpose()?;
    let present = present.map(boolean).transpose()?;
    let both = match (mask, present) {
        (Some(mask), Some(present)) => mask.f_logical_and(&present)?,
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => return Ok(None),
    };
    both.f_expand(local.size(), false).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_begin_alike_keep_their_weights() {
        let level = |name: &str| Variable { part_of: Some("geopotential".into()), ..Variable::new(name) };
        let names =
            [level("geopotential_500"), level("geopotential_850"), Variable::new("geopotential_at_surface")];
        let config = |name: &str| {
            let variables = [(name.to_owned(), 4.0)].into();
            WeightsConfig { variables, ..WeightsConfig::default() }
        };
        assert_eq!(channels(&config("geopotential"), &names).unwrap(), [4.0 / 3.0, 4.0 / 3.0, 1.0 / 3.0]);
        assert_eq!(channels(&config("geopotential_at_surface"), &names).unwrap(), [0.5, 0.5, 2.0]);
    }
}
