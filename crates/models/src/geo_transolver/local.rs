//! Local features: features of the neighbours of a point within given radii.

use isobar_array::{Array, Comparison};
use isobar_nn::{Linear, Mode};
use isobar_shard::Params;

use super::GeoTransolverConfig;
use crate::error::Result;
use crate::point_attention::{AttentionSpec, Tokenizer};

/// Number of coordinates of a point.
const COORDINATES: i64 = 3;

/// Features of the neighbours of one stream's points. State dict: `processors.{radius}.mlp.layers.{0,2,4}` and
/// `tokenizers.{radius}`.
#[derive(Debug)]
pub(super) struct LocalFeatures<A>(Vec<Scale<A>>);

#[derive(Debug)]
struct Scale<A> {
    radius: f64,
    count: i64,
    layers: [Linear<A>; 3],
    tokenizer: Tokenizer<A>,
}

impl<A: Array> LocalFeatures<A> {
    /// Makes the layers of stream number `stream`.
    pub(super) fn new(
        config: &GeoTransolverConfig,
        stream: usize,
        spec: &AttentionSpec,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let (name, hidden) =
            (format!("context_builder.local_extractors.{stream}"), config.n_hidden_local as i64);
        let mut params = params.scope(&name);
        let mut scales = Vec::new();
        for (at, (radius, count)) in config.scales()?.into_iter().enumerate() {
            let sizes = [COORDINATES * count, hidden, hidden / 2, hidden];
            let mut layer = |at_layer: usize| {
                let name = format!("processors.{at}.mlp.layers.{}", 2 * at_layer);
                let channels = [sizes[at_layer], sizes[at_layer + 1]];
                spec.start.linear(channels, true, &mut params.scope(&name))
            };
            let layers = [layer(0)?, layer(1)?, layer(2)?];
            let own = format!("tokenizers.{at}");
            let tokenizer = Tokenizer::new(&format!("{name}.{own}"), hidden, spec, &mut params.scope(&own))?;
            scales.push(Scale { radius, count, layers, tokenizer });
        }
        Ok(Self(scales))
    }

    /// Computes, for each radius, slices of the geometry's points from the stream's points near them:
    /// `[batch, heads, slices, features]`.
    pub(super) fn context(&self, positions: &A, geometry: &A, mode: Mode<'_>) -> Result<Vec<A>> {
        self.0
            .iter()
            .map(|scale| scale.tokenizer.forward(&scale.features(positions, geometry)?, mode))
            .collect()
    }

    /// Returns the tokenizers of all radii.
    pub(super) fn tokenizers(&self) -> impl Iterator<Item = &Tokenizer<A>> {
        self.0.iter().map(|scale| &scale.tokenizer)
    }

    /// Computes features of the stream's points, `[batch, points, radii · n_hidden_local]`, from the geometry's points near them.
    pub(super) fn features(&self, positions: &A, geometry: &A) -> Result<A> {
        let each =
            self.0.iter().map(|scale| scale.features(geometry, positions)).collect::<Result<Vec<A>>>()?;
        Ok(A::cat(&each.iter().collect::<Vec<_>>(), -1)?)
    }
}

impl<A: Array> Scale<A> {
    /// Computes tanh(W₃ gelu(W₂ gelu(W₁ p))), with p the coordinates of the `points` near each of `queries`.
    fn features(&self, points: &A, queries: &A) -> Result<A> {
        let mut x = neighbours(points, queries, self.radius, self.count)?;
        for layer in &self.layers[..2] {
            x = layer.forward(&x)?.gelu()?;
        }
        Ok(self.layers[2].forward(&x)?.tanh()?)
    }
}

/// Returns the coordinates of the `count` `points` `[batch, n, 3]` nearest to each of `queries` `[batch, q, 3]`, the nearest first:
/// `[batch, q, 3 · count]`. Points beyond the radius are zeros.
fn neighbours<A: Array>(points: &A, queries: &A, radius: f64, count: i64) -> Result<A> {
    let (samples, found) = (points.extent(0)?, count.min(points.extent(1)?));
    let mut each = Vec::new();
    for sample in 0..samples {
        let [points, queries] = [points.select(0, sample)?, queries.select(0, sample)?];
        let asked = queries.extent(0)?;
        let (distances, indices) = points.detach()?.knn(&queries.detach()?, found)?;
        let near = points.index_select(0, &indices.reshape(&[asked * found])?)?;
        let near = near.reshape(&[asked, found, COORDINATES])?;
        let limit = distances.mul_scalar(0.0)?.add_scalar(radius)?;
        let beyond = distances.compare(Comparison::Gt, &limit)?.unsqueeze(-1)?;
        let near = near.masked_fill(&beyond, 0.0)?.reshape(&[asked, COORDINATES * found])?;
        each.push(near.pad(&[0, COORDINATES * (count - found)], 0.0)?);
    }
    Ok(A::stack(&each.iter().collect::<Vec<_>>(), 0)?)
}
