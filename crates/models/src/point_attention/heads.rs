//! Projections of points to heads and back.

use isobar_array::{Array, Conv, Padding};
use isobar_nn::{ConvNd, Linear};
use isobar_shard::{Init, Params, Placement};

use super::spec::AttentionSpec;
use crate::error::Result;

/// Projection of points to heads: a linear layer, or on a grid a convolution with kernels of 3.
#[derive(Debug)]
pub(super) enum Projection<A> {
    Linear(Linear<A>),
    Conv(ConvNd<A>),
}

impl<A: Array> Projection<A> {
    /// Makes the projection of points with `inputs` features; a convolution over the grid's dims where `grid` names their number.
    pub(super) fn new(
        inputs: i64,
        grid: Option<usize>,
        spec: &AttentionSpec,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let channels = [inputs, spec.width];
        Ok(match grid {
            None => Self::Linear(spec.start.linear(channels, true, params)?),
            Some(dims) => {
                let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
                Self::Conv(ConvNd::new(channels, &vec![3; dims], conv, params)?)
            }
        })
    }

    /// Returns whether each point is projected by itself.
    pub(super) fn is_pointwise(&self) -> bool {
        matches!(self, Self::Linear(_))
    }

    /// Computes `[batch, points…, heads, features]` from `x` `[batch, points…, in_features]`.
    pub(super) fn forward(&self, x: &A, heads: i64) -> Result<A> {
        let y = match self {
            Self::Linear(linear) => linear.forward(x)?,
            Self::Conv(conv) => channels_last(&conv.forward(&channels_second(x)?)?)?,
        };
        let mut shape = y.shape();
        let width = shape.pop().unwrap_or(0);
        shape.extend([heads, width / heads]);
        Ok(y.reshape(&shape)?)
    }
}

/// Output projection of the heads, applied to the slices before weighting or, equivalently, to the points after.
#[derive(Debug)]
pub(super) struct OutProjection<A> {
    weight: A,
    bias: A,
    heads: i64,
    /// True if the slices are projected in place of the points, where they are fewer.
    slices_first: bool,
}

impl<A: Array> OutProjection<A> {
    pub(super) fn new(spec: &AttentionSpec, params: &mut impl Params<Array = A>) -> Result<Self> {
        let width = spec.width;
        let init = |init: Option<Init<A>>| init.unwrap_or(Init::FanIn(width));
        let whole = Placement::Replicate;
        let weight = params.param("weight", &[width, width], init(spec.start.weight()), whole)?;
        let bias = params.param("bias", &[width], init(spec.start.bias()), whole)?;
        // Multiplications per point and feature: weighting projected slices, or weighting slices and projecting the
        // result.
        let slices_first = spec.heads.saturating_mul(spec.slices) < spec.slices.saturating_add(width);
        Ok(Self { weight, bias, heads: spec.heads, slices_first })
    }

    /// Returns the slices `[batch, heads, slices, features]` in the form that [`spread`](Self::spread) takes.
    pub(super) fn prepare(&self, slices: &A) -> Result<A> {
        if !self.slices_first {
            return Ok(slices.shallow_clone());
        }
        let [width, features] = [self.weight.shape()[0], slices.shape()[3]];
        let weight = self.weight.reshape(&[width, self.heads, features])?;
        Ok(A::einsum("basd,cad->basc", &[slices, &weight])?)
    }

    /// Computes the projection of Σ w · slice for each point, from weights `[batch, points…, heads, slices]` and what
    /// [`prepare`](Self::prepare) returned.
    pub(super) fn spread(&self, weights: &A, slices: &A) -> Result<A> {
        let points = letters(weights);
        if self.slices_first {
            let y = A::einsum(&format!("b{points}as,basc->b{points}c"), &[weights, slices])?;
            return Ok(y.add(&self.bias)?);
        }
        self.project(&spread(weights, slices)?)
    }

    /// Computes the projection of heads `[batch, points…, heads, features]`.
    pub(super) fn project(&self, heads: &A) -> Result<A> {
        let mut shape = heads.shape();
        let features = shape.pop().unwrap_or(0) * shape.pop().unwrap_or(0);
        shape.push(features);
        Ok(heads.reshape(&shape)?.linear(&self.weight, Some(&self.bias))?)
    }
}

/// Σ w · slice for each point: `[batch, points…, heads, features]` from `[batch, points…, heads, slices]` and `[batch, heads, slices,
/// features]`.
pub(super) fn spread<A: Array>(weights: &A, slices: &A) -> Result<A> {
    let points = letters(weights);
    Ok(A::einsum(&format!("b{points}as,basd->b{points}ad"), &[weights, slices])?)
}

/// Sums of weights, and of weighted features, over the points: `[batch, heads, slices, features + 1]`, where the last feature is the
/// sum of the weights. One reduction where points are split.
pub(super) fn weighted_sums<A: Array>(weights: &A, features: &A) -> Result<A> {
    let points = letters(weights);
    let with_one = features.pad(&[0, 1], 1.0)?;
    Ok(A::einsum(&format!("b{points}as,b{points}ad->basd"), &[weights, &with_one])?)
}

/// Splits reduced sums into those of features and those of weights.
pub(super) fn reduced<A: Array>(sums: &A) -> Result<[A; 2]> {
    let (part, layout) = sums.into_local()?;
    let sums = A::from_local(part, &layout);
    let features = sums.extent(3)? - 1;
    Ok([sums.narrow(3, 0, features)?, sums.narrow(3, features, 1)?])
}

/// Letters of the dims of points of an array `[batch, points…, heads, any]`.
pub(super) fn letters<A: Array>(x: &A) -> &'static str {
    &"xyz"[..x.shape().len().saturating_sub(3).min(3)]
}

/// `[batch, points…, features]` as `[batch, features, points…]`.
pub(super) fn channels_second<A: Array>(x: &A) -> Result<A> {
    let last = x.shape().len() as i64 - 1;
    let order: Vec<i64> = [0, last].into_iter().chain(1..last).collect();
    Ok(x.permute(&order)?)
}

/// `[batch, features, points…]` as `[batch, points…, features]`.
pub(super) fn channels_last<A: Array>(x: &A) -> Result<A> {
    let dims = x.shape().len() as i64;
    let order: Vec<i64> = [0].into_iter().chain(2..dims).chain([1]).collect();
    Ok(x.permute(&order)?)
}
