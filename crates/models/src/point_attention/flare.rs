//! FLARE's attention: trained queries attend to the points, and the points to the queries.

use isobar_array::{Array, Reduction, Unary};
use isobar_nn::{Linear, Mode};
use isobar_shard::{Init, Params, Placement};

use super::cross::Cross;
use super::heads::{OutProjection, Projection, letters, reduced, spread, weighted_sums};
use super::spec::AttentionSpec;
use super::tiles::Tiles;
use crate::error::Result;
use crate::layers::Recompute;

/// Layers applied to each point: the scores, which serve both ways, and the values.
#[derive(Debug)]
struct Points<A> {
    x: Projection<A>,
    self_k: Linear<A>,
    self_v: Linear<A>,
    q_global: A,
    cross: Option<Cross<A>>,
    out: OutProjection<A>,
    heads: i64,
}

impl<A: Array> Points<A> {
    /// Heads `[batch, points…, heads, features]` of points, or, where there is one tile, the heads themselves.
    fn heads(&self, tile: &[A]) -> Result<A> {
        match tile {
            [x] => self.x.forward(x, self.heads),
            _ => Ok(tile[0].shallow_clone()),
        }
    }

    /// Scores `[batch, points…, heads, queries]`, not scaled.
    fn scores(&self, tile: &[A], heads: &A) -> Result<A> {
        if let [_, scores] = tile {
            return Ok(scores.shallow_clone());
        }
        let shape = self.q_global.shape();
        let queries = self.q_global.reshape(&shape[1..])?;
        let points = letters(heads);
        Ok(A::einsum(&format!("b{points}ad,asd->b{points}as"), &[&self.self_k.forward(heads)?, &queries])?)
    }

    /// Σ e^(score − top) and Σ e^(score − top) · value over the points.
    fn sums(&self, tile: &[A], top: &A) -> Result<A> {
        let heads = self.heads(tile)?;
        let weights = self.scores(tile, &heads)?.sub(top)?.unary(Unary::Exp)?;
        weighted_sums(&weights, &self.self_v.forward(&heads)?)
    }

    /// The projection of what each point takes from the queries' results, mixed with what it reads from the context.
    fn spread(&self, tile: &[A], results: &A, context: Option<[&A; 2]>) -> Result<A> {
        let heads = self.heads(tile)?;
        let weights = self.scores(tile, &heads)?.softmax(-1)?;
        let (Some(cross), Some([key, value])) = (&self.cross, context) else {
            return self.out.spread(&weights, &self.out.prepare(results)?);
        };
        let query = cross.query(&heads)?;
        let points = letters(&query);
        let scores = A::einsum(&format!("b{points}ad,basd->b{points}as"), &[&query, key])?;
        let read = spread(&scores.softmax(-1)?, value)?;
        self.out.project(&cross.mix(&spread(&weights, results)?, &read)?)
    }
}

/// Attention by way of trained queries.
#[derive(Debug)]
pub(super) struct FlareAttention<A> {
    points: Recompute<Points<A>>,
    tiles: usize,
}

impl<A: Array> FlareAttention<A> {
    pub(super) fn new(name: &str, spec: &AttentionSpec, params: &mut impl Params<Array = A>) -> Result<Self> {
        let features = spec.features();
        let shape = [1, spec.heads, spec.slices, features];
        let normal = Init::Normal { mean: 0.0, std: 1.0 };
        let q_global = params.param("q_global", &shape, normal, Placement::Replicate)?;
        let x = Projection::new(spec.width, None, spec, &mut params.scope("in_project_x"))?;
        let self_k = spec.start.linear([features; 2], true, &mut params.scope("self_k"))?;
        let self_v = spec.start.linear([features; 2], true, &mut params.scope("self_v"))?;
        let cross = Cross::of_spec(spec, params)?;
        let out = OutProjection::new(spec, &mut params.scope("out_linear"))?;
        let points = Points { x, self_k, self_v, q_global, cross, out, heads: spec.heads };
        Ok(Self { points: Recompute::new(name, points, spec.tiles > 1), tiles: spec.tiles })
    }

    /// Computes `[batch, points…, width]` from points of that shape and the context's slices.
    pub(super) fn forward(&self, x: &A, context: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let inputs = match self.points.is_enabled() {
            true => vec![x.shallow_clone()],
            false => self.points.with(|points| -> Result<Vec<A>> {
                let heads = points.x.forward(x, points.heads)?;
                let scores = points.scores(&[], &heads)?;
                Ok(vec![heads, scores])
            })?,
        };
        let dims = x.shape().len() - 2;
        let tiles = Tiles::new(&inputs, dims, self.tiles)?;
        let results = self.results(&tiles, dims, mode)?;
        let context = context.map(|context| self.points.with(|points| points.keys(context))).transpose()?;
        let context = context.flatten();
        tiles.map(|tile| {
            let count = tile.len();
            let mut inputs: Vec<&A> = tile.iter().chain([&results]).collect();
            inputs.extend(context.iter().flatten());
            self.points.forward(&inputs, mode, move |points, inputs, _| {
                let context = match inputs[count + 1..] {
                    [ref key, ref value] => Some([key, value]),
                    _ => None,
                };
                points.spread(&inputs[..count], &inputs[count], context)
            })
        })
    }

    /// softmax(queries · keysᵀ) values over all points, `[batch, heads, queries, features]`: a maximum and a sum of that size are
    /// all that ranks exchange.
    fn results(&self, tiles: &Tiles<A>, dims: usize, mode: Mode<'_>) -> Result<A> {
        let over: Vec<i64> = (1..=dims as i64).collect();
        let top = tiles.fold(
            |tile| {
                self.points.with(|points| {
                    let scores = points.scores(tile, &points.heads(tile)?)?.detach()?;
                    Ok(scores.reduce(Reduction::Max, &over, true)?)
                })
            },
            |a, b| a.binary(isobar_array::Binary::Maximum, b),
        )?;
        let sums = tiles.fold(
            |tile| {
                let inputs: Vec<&A> = tile.iter().chain([&top]).collect();
                self.points.forward(&inputs, mode, |points, inputs, _| {
                    let last = inputs.len() - 1;
                    points.sums(&inputs[..last], &inputs[last])
                })
            },
            A::add,
        )?;
        let [values, weights] = reduced(&sums)?;
        Ok(values.div(&weights)?)
    }
}

impl<A: Array> Points<A> {
    /// Keys and values of the context, where there is one.
    fn keys(&self, context: &A) -> Result<Option<[A; 2]>> {
        self.cross.as_ref().map(|cross| cross.keys(context)).transpose()
    }
}
