//! Transolver's attention: points are averaged into slices, slices attend to each other, and points take up slices.

use isobar_array::{Array, AttentionOptions, Unary};
use isobar_nn::{Linear, Mode};
use isobar_shard::{Init, Params, Placement};

use super::cross::Cross;
use super::heads::{OutProjection, Projection, reduced, weighted_sums};
use super::spec::AttentionSpec;
use super::tiles::Tiles;
use crate::error::Result;
use crate::layers::Recompute;

/// Added to the sums of weights.
const FLOOR: f64 = 0.01;

/// Bounds of the temperature.
const TEMPERATURE: Unary = Unary::Clamp { min: 0.5, max: 5.0 };

/// The weights of points in slices, and the sums over points.
#[derive(Debug)]
pub(super) struct Slicing<A> {
    x: Projection<A>,
    fx: Projection<A>,
    in_project_slice: Linear<A>,
    temperature: A,
    heads: i64,
}

impl<A: Array> Slicing<A> {
    /// Makes the slicing of points with `inputs` features.
    pub(super) fn new(
        inputs: i64,
        spec: &AttentionSpec,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let (heads, whole) = (spec.heads, Placement::Replicate);
        let temperature = params.param("temperature", &[1, 1, heads, 1], Init::Constant(0.5), whole)?;
        let x = Projection::new(inputs, spec.grid, spec, &mut params.scope("in_project_x"))?;
        let fx = Projection::new(inputs, spec.grid, spec, &mut params.scope("in_project_fx"))?;
        let channels = [spec.features(), spec.slices];
        let params = &mut params.scope("in_project_slice");
        let in_project_slice = match spec.orthogonal {
            true => super::cross::orthogonal(channels, params)?,
            false => spec.start.linear(channels, true, params)?,
        };
        Ok(Self { x, fx, in_project_slice, temperature, heads })
    }

    /// Returns what a tile of points needs: the points, or, where convolutions look beyond a tile, their projections.
    fn inputs(&self, x: &A) -> Result<Vec<A>> {
        match self.x.is_pointwise() {
            true => Ok(vec![x.shallow_clone()]),
            false => Ok(vec![self.x.forward(x, self.heads)?, self.fx.forward(x, self.heads)?]),
        }
    }

    /// Weights `[batch, points…, heads, slices]`.
    fn weights(&self, inputs: &[A]) -> Result<A> {
        let projected;
        let x = match inputs {
            [x] => {
                projected = self.x.forward(x, self.heads)?;
                &projected
            }
            _ => &inputs[0],
        };
        let temperature = self.temperature.unary(TEMPERATURE)?.reshape(&[self.heads, 1])?;
        Ok(self.in_project_slice.forward(x)?.div(&temperature)?.softmax(-1)?)
    }

    /// Sums over points, `[batch, heads, slices, features + 1]`.
    fn sums(&self, inputs: &[A], weights: &A) -> Result<A> {
        match inputs {
            [x] => weighted_sums(weights, &self.fx.forward(x, self.heads)?),
            _ => weighted_sums(weights, &inputs[1]),
        }
    }
}

/// A slicing of an array of points, in tiles.
pub(super) struct Sliced<'a, A> {
    slicing: &'a Recompute<Slicing<A>>,
    tiles: Tiles<A>,
    /// The weights, where there is one tile.
    weights: Option<A>,
}

impl<'a, A: Array> Sliced<'a, A> {
    /// Prepares points `x` `[batch, points…, in_features]`.
    pub(super) fn new(slicing: &'a Recompute<Slicing<A>>, x: &A, count: usize) -> Result<Self> {
        let inputs = slicing.with(|slicing| slicing.inputs(x))?;
        let tiles = Tiles::new(&inputs, x.shape().len() - 2, count)?;
        let weights = match slicing.is_enabled() {
            true => None,
            false => Some(slicing.with(|slicing| slicing.weights(&inputs))?),
        };
        Ok(Self { slicing, tiles, weights })
    }

    /// Mean features of the slices, `[batch, heads, slices, features]`.
    pub(super) fn tokens(&self, mode: Mode<'_>) -> Result<A> {
        let sum = |tile: &[A]| match &self.weights {
            Some(weights) => self.slicing.with(|slicing| slicing.sums(tile, weights)),
            None => {
                let inputs: Vec<&A> = tile.iter().collect();
                self.slicing
                    .forward(&inputs, mode, |slicing, tile, _| slicing.sums(tile, &slicing.weights(tile)?))
            }
        };
        let [features, weights] = reduced(&self.tiles.fold(sum, A::add)?)?;
        Ok(features.div(&weights.add_scalar(FLOOR)?)?)
    }

    /// The projection of Σ weight · slice for each point.
    fn spread(&self, slices: &A, out: &Recompute<OutProjection<A>>, mode: Mode<'_>) -> Result<A> {
        let slices = out.with(|out| out.prepare(slices))?;
        self.tiles.map(|tile| match &self.weights {
            Some(weights) => out.with(|out| out.spread(weights, &slices)),
            None => {
                let inputs: Vec<&A> = tile.iter().chain([&slices]).collect();
                let out = out.shallow_clone();
                self.slicing.forward(&inputs, mode, move |slicing, inputs, _| {
                    let (slices, tile) = (&inputs[inputs.len() - 1], &inputs[..inputs.len() - 1]);
                    let weights = slicing.weights(tile)?;
                    out.with(|out| out.spread(&weights, slices))
                })
            }
        })
    }
}

/// Attention by way of slices.
#[derive(Debug)]
pub(super) struct SliceAttention<A> {
    slicing: Recompute<Slicing<A>>,
    qkv_project: Linear<A>,
    cross: Option<Cross<A>>,
    out: Recompute<OutProjection<A>>,
    spec: AttentionSpec,
}

impl<A: Array> SliceAttention<A> {
    pub(super) fn new(name: &str, spec: &AttentionSpec, params: &mut impl Params<Array = A>) -> Result<Self> {
        let features = spec.features();
        let slicing = Recompute::new(name, Slicing::new(spec.width, spec, params)?, spec.tiles > 1);
        let channels = [features, 3 * features];
        let qkv_project = spec.start.linear(channels, false, &mut params.scope("qkv_project"))?;
        let cross = Cross::of_spec(spec, params)?;
        let out = OutProjection::new(spec, &mut params.scope("out_linear"))?;
        Ok(Self { slicing, qkv_project, cross, out: Recompute::new(name, out, false), spec: *spec })
    }

    /// Computes `[batch, points…, width]` from points of that shape and the context's slices.
    pub(super) fn forward(&self, x: &A, context: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let sliced = Sliced::new(&self.slicing, x, self.spec.tiles)?;
        let slices = sliced.tokens(mode)?;
        let features = self.spec.features();
        let qkv = self.qkv_project.forward(&slices)?.split(&[features; 3], -1)?;
        let options = AttentionOptions::default();
        let mut mixed = A::scaled_dot_product_attention(&qkv[0], &qkv[1], &qkv[2], &options)?;
        if let (Some(cross), Some(context)) = (&self.cross, context) {
            let [key, value] = cross.keys(context)?;
            let query = cross.query(&slices)?;
            let read = A::scaled_dot_product_attention(&query, &key, &value, &options)?;
            mixed = cross.mix(&mixed, &read)?;
        }
        sliced.spread(&mixed, &self.out, mode)
    }
}
