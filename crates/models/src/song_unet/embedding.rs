//! From the noise level and the labels of a sample to the vector that its blocks read.

use isobar_array::{Array, Unary};
use isobar_nn::{Linear, LinearOptions, Mode};
use isobar_shard::{Init, Params, Placement};

use super::layers::linear;
use super::plan::{Plan, Style};
use super::{EmbeddingType, SongUNetConfig};
use crate::error::Result;

/// Ratio of the highest to the lowest positional frequency.
const SPAN: f64 = 10000.0;

/// Noise levels and labels of the samples.
pub(super) struct Labels<'a, A> {
    /// `[batch]` or `[1]`.
    pub(super) noise: &'a A,
    /// `[batch, label_dim]` or `[1, label_dim]`.
    pub(super) class: Option<&'a A>,
    /// `[batch, augment_dim]`.
    pub(super) augment: Option<&'a A>,
}

#[derive(Debug)]
pub(super) struct Embedding<A> {
    freqs: A,
    /// Factor of the frequencies.
    factor: f64,
    labels: Option<(Linear<A>, f64)>,
    label_dropout: f64,
    augmentations: Option<Linear<A>>,
    layers: [Linear<A>; 2],
    style: Style,
}

impl<A: Array> Embedding<A> {
    pub(super) fn new(
        config: &SongUNetConfig,
        plan: &Plan,
        params: &mut impl Params<Array = A>,
    ) -> Result<Option<Self>> {
        if plan.style == Style::Adm {
            return Self::of_adm(config, plan, params).map(Some);
        }
        let style = plan.style;
        let (freqs, factor) = match config.embedding_type {
            EmbeddingType::Zero => return Ok(None),
            EmbeddingType::Positional => (positional(plan.noise / 2, true, params)?, 1.0),
            EmbeddingType::Fourier => {
                let start = Init::Normal { mean: 0.0, std: 16.0 };
                let shape = [plan.noise / 2];
                let freqs = params.buffer("map_noise.freqs", &shape, start, Placement::Replicate)?;
                (freqs, std::f64::consts::TAU)
            }
        };
        let mut layer = |name: &str, inputs: i64, outputs: i64, bias: bool| {
            linear(style, [inputs, outputs], bias, &mut params.scope(name))
        };
        let labels = match plan.labels {
            0 => None,
            dim => Some((layer("map_label", dim, plan.noise, true)?, (dim as f64).sqrt())),
        };
        let augmentations = match plan.augmentations {
            0 => None,
            dim => Some(layer("map_augment", dim, plan.noise, false)?),
        };
        let layers = [
            layer("map_layer0", plan.noise, plan.embedding, true)?,
            layer("map_layer1", plan.embedding, plan.embedding, true)?,
        ];
        let label_dropout = config.label_dropout;
        Ok(Some(Self { freqs, factor, labels, label_dropout, augmentations, layers, style }))
    }

    /// Makes ADM's layers: class labels are added after both layers, without a factor.
    fn of_adm(config: &SongUNetConfig, plan: &Plan, params: &mut impl Params<Array = A>) -> Result<Self> {
        let freqs = positional(plan.noise / 2, false, params)?;
        let mut map = |name: &str, inputs: i64, outputs: i64, start: Init<A>| {
            let options = LinearOptions { bias: false, weight_init: Some(start), ..Default::default() };
            (inputs > 0)
                .then(|| Linear::with_options(inputs, outputs, options, &mut params.scope(name)))
                .transpose()
        };
        let augmentations = map("map_augment", plan.augmentations, plan.noise, Init::Constant(0.0))?;
        let normal = Init::Normal { mean: 0.0, std: 1.0 };
        let labels = map("map_label", plan.labels, plan.embedding, normal)?.map(|map| (map, 1.0));
        let layers = [
            linear(plan.style, [plan.noise, plan.embedding], true, &mut params.scope("map_layer0"))?,
            linear(plan.style, [plan.embedding; 2], true, &mut params.scope("map_layer1"))?,
        ];
        let (label_dropout, style) = (config.label_dropout, plan.style);
        Ok(Self { freqs, factor: 1.0, labels, label_dropout, augmentations, layers, style })
    }

    /// `[batch, embedding]`, or `[1, embedding]` for one noise level and no labels.
    pub(super) fn forward(&self, labels: &Labels<'_, A>, batch: i64, mode: Mode<'_>) -> Result<A> {
        let count = labels.noise.extent(0)?;
        let freqs = self.freqs.mul_scalar(self.factor)?;
        let angles = labels.noise.reshape(&[count, 1])?.mul(&freqs.to_kind(labels.noise.kind())?)?;
        let (sin, cos) = (angles.unary(Unary::Sin)?, angles.unary(Unary::Cos)?);
        let mut e = match self.style {
            Style::Song => A::cat(&[&sin, &cos], 1)?,
            Style::Adm => A::cat(&[&cos, &sin], 1)?,
        };
        if self.style == Style::Song {
            e = self.with_labels(e, labels, batch, mode)?;
        }
        if let (Some(map), Some(augment)) = (&self.augmentations, labels.augment) {
            e = e.add(&map.forward(augment)?)?;
        }
        let [first, second] = &self.layers;
        e = second.forward(&first.forward(&e)?.unary(Unary::Silu)?)?;
        if self.style == Style::Adm {
            e = self.with_labels(e, labels, batch, mode)?;
        }
        Ok(e.unary(Unary::Silu)?)
    }

    fn with_labels(&self, e: A, labels: &Labels<'_, A>, batch: i64, mode: Mode<'_>) -> Result<A> {
        let (Some((map, factor)), Some(class)) = (&self.labels, labels.class) else { return Ok(e) };
        Ok(e.add(&map.forward(&self.dropped(class, batch, mode)?.mul_scalar(*factor)?)?)?)
    }

    /// Class labels, in training with those of some samples replaced by zeros.
    fn dropped(&self, class: &A, batch: i64, mode: Mode<'_>) -> Result<A> {
        if !mode.is_training() || self.label_dropout == 0.0 {
            return Ok(class.shallow_clone());
        }
        let each = class.expand(&[batch, class.extent(1)?])?;
        // Labels that remain are not scaled.
        Ok(mode.drop_path(&each, self.label_dropout, 0)?.mul_scalar(1.0 - self.label_dropout)?)
    }
}

/// Makes frequencies from 1 down to 1 / [`SPAN`] (excluded without `end`), evenly spaced in logarithm.
fn positional<A: Array>(count: i64, end: bool, params: &mut impl Params<Array = A>) -> Result<A> {
    const NAME: &str = "map_noise.freqs";
    let share = if end { 1.0 } else { (count - 1) as f64 / count as f64 };
    let logarithms = Init::Linspace { start: 0.0, end: -SPAN.ln() * share };
    let freqs = params.draw(NAME, &[count], &logarithms, Placement::Replicate)?.unary(Unary::Exp)?;
    Ok(params.buffer(NAME, &[count], Init::Given(freqs), Placement::Replicate)?)
}
