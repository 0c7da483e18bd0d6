//! From the noise level and the labels of a sample to the vector that its blocks read.

use isobar_array::{Array, Unary};
use isobar_nn::{Linear, Mode};
use isobar_shard::{Init, Params, Placement};

use super::layers::linear;
use super::plan::Plan;
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
}

impl<A: Array> Embedding<A> {
    pub(super) fn new(
        config: &SongUNetConfig,
        plan: &Plan,
        params: &mut impl Params<Array = A>,
    ) -> Result<Option<Self>> {
        let (freqs, factor) = match config.embedding_type {
            EmbeddingType::Zero => return Ok(None),
            EmbeddingType::Positional => (positional(plan.noise / 2, params)?, 1.0),
            EmbeddingType::Fourier => {
                let start = Init::Normal { mean: 0.0, std: 16.0 };
                let shape = [plan.noise / 2];
                let freqs = params.buffer("map_noise.freqs", &shape, start, Placement::Replicate)?;
                (freqs, std::f64::consts::TAU)
            }
        };
        let mut layer = |name: &str, inputs: i64, outputs: i64, bias: bool| {
            linear([inputs, outputs], bias, &mut params.scope(name))
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
        Ok(Some(Self { freqs, factor, labels, label_dropout, augmentations, layers }))
    }

    /// `[batch, embedding]`, or `[1, embedding]` for one noise level and no labels.
    pub(super) fn forward(&self, labels: &Labels<'_, A>, batch: i64, mode: Mode<'_>) -> Result<A> {
        let count = labels.noise.extent(0)?;
        let freqs = self.freqs.mul_scalar(self.factor)?;
        let angles = labels.noise.reshape(&[count, 1])?.mul(&freqs.to_kind(labels.noise.kind())?)?;
        let mut e = A::cat(&[&angles.unary(Unary::Sin)?, &angles.unary(Unary::Cos)?], 1)?;
        if let (Some((map, factor)), Some(class)) = (&self.labels, labels.class) {
            e = e.add(&map.forward(&self.dropped(class, batch, mode)?.mul_scalar(*factor)?)?)?;
        }
        if let (Some(map), Some(augment)) = (&self.augmentations, labels.augment) {
            e = e.add(&map.forward(augment)?)?;
        }
        for layer in &self.layers {
            e = layer.forward(&e)?.unary(Unary::Silu)?;
        }
        Ok(e)
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

/// Frequencies from 1 to 1 / [`SPAN`], their logarithms evenly spaced.
fn positional<A: Array>(count: i64, params: &mut impl Params<Array = A>) -> Result<A> {
    const NAME: &str = "map_noise.freqs";
    let logarithms = Init::Linspace { start: 0.0, end: -SPAN.ln() };
    let freqs = params.draw(NAME, &[count], &logarithms, Placement::Replicate)?.unary(Unary::Exp)?;
    Ok(params.buffer(NAME, &[count], Init::Given(freqs), Placement::Replicate)?)
}
