//! Transolver's attention: points are averaged into slices, slices attend to each other, and points take up slices.

use isobar_array::{Array, AttentionOptions, Unary};
use isobar_nn::{Linear, Mode};
use isobar_shard::{Init, Params, Placement};
use tch::Kind;

use super::cross::Cross;
use super::heads::{OutProjection, Projection, reduced, weighted_sums};
use super::spec::AttentionSpec;
use super::tiles::Tiles;
use crate::error::Result;
use crate::layers::Recompute;

/// Added to the sums of weights.
const FLOOR: f64 = 0.01;

/// Bounds of the temperature, and of those of Transolver++.
const TEMPERATURE: Unary = Unary::Clamp { min: 0.5, max: 5.0 };
const POINT_TEMPERATURE: Unary = Unary::Clamp { min: 0.01, max: f64::INFINITY };

/// Keeps the logarithms of Gumbel noise finite.
const TINY: f64 = 1e-8;

/// The weights of points in slices, and the sums over points.
#[derive(Debug)]
pub(super) struct Slicing<A> {
    x: Projection<A>,
    features: Features<A>,
    in_project_slice: Linear<A>,
    temperature: A,
    heads: i64,
    slices: i64,
    /// True if points are projected before they are cut into tiles.
    ahead: bool,
}

/// The features that slices average.
#[derive(Debug)]
enum Features<A> {
    /// A second projection of the points.
    Own(Projection<A>),
    /// Those that are weighted, which also change the temperature: Transolver++.
    Shared(PointTemperature<A>),
}

/// gelu(W₂ gelu(W₁ x)), added to the temperature. State dict: `0`, `2`.
#[derive(Debug)]
struct PointTemperature<A>([Linear<A>; 2]);

impl<A: Array> PointTemperature<A> {
    fn new(spec: &AttentionSpec, params: &mut impl Params<Array = A>) -> Result<Self> {
        let sizes = [("0", [spec.features(), spec.slices]), ("2", [spec.slices, 1])];
        let [first, second] =
            sizes.map(|(name, sizes)| spec.start.linear(sizes, true, &mut params.scope(name)));
        Ok(Self([first?, second?]))
    }

    /// Computes `[batch, points…, heads, 1]` from heads `[batch, points…, heads, features]`.
    fn forward(&self, heads: &A) -> Result<A> {
        let [first, second] = &self.0;
        Ok(second.forward(&first.forward(heads)?.gelu()?)?.gelu()?)
    }
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
        let features = match spec.plus {
            true => Features::Shared(PointTemperature::new(spec, &mut params.scope("proj_temperature"))?),
            false => {
                Features::Own(Projection::new(inputs, spec.grid, spec, &mut params.scope("in_project_fx"))?)
            }
        };
        let channels = [spec.features(), spec.slices];
        let params = &mut params.scope("in_project_slice");
        let in_project_slice = match spec.orthogonal {
            true => super::cross::orthogonal(channels, params)?,
            false => spec.start.linear(channels, true, params)?,
        };
        // Convolutions look beyond a tile; without tiles, a projection with two uses is computed once.
        let ahead = !x.is_pointwise() || (spec.plus && spec.tiles == 1);
        Ok(Self { x, features, in_project_slice, temperature, heads, slices: spec.slices, ahead })
    }

    /// Returns what a tile of points needs: the points or their projections, and the noise of Transolver++.
    fn inputs(&self, x: &A, mode: Mode<'_>) -> Result<Vec<A>> {
        let mut inputs = match (self.ahead, &self.features) {
            (false, _) => vec![x.shallow_clone()],
            (true, Features::Shared(_)) => vec![self.x.forward(x, self.heads)?],
            (true, Features::Own(fx)) => vec![self.x.forward(x, self.heads)?, fx.forward(x, self.heads)?],
        };
        if matches!(self.features, Features::Shared(_)) {
            inputs.extend(self.noise(x, mode)?);
        }
        Ok(inputs)
    }

    /// Gumbel noise `[batch, points…, heads, slices]` for points `x` `[batch, points…, features]`; none in evaluation.
    fn noise(&self, x: &A, mode: Mode<'_>) -> Result<Option<A>> {
        let mut shape = x.shape();
        shape.pop();
        let one = [&shape[..], &[1, 1]].concat();
        shape.extend([self.heads, self.slices]);
        gumbel(&x.detach()?.narrow(-1, 0, 1)?.reshape(&one)?, &shape, mode)
    }

    /// The projection `[batch, points…, heads, features]` whose scores weight the points.
    fn projected(&self, inputs: &[A]) -> Result<A> {
        match self.ahead {
            true => Ok(inputs[0].shallow_clone()),
            false => self.x.forward(&inputs[0], self.heads),
        }
    }

    /// Weights `[batch, points…, heads, slices]`.
    fn weights(&self, inputs: &[A]) -> Result<A> {
        let x = self.projected(inputs)?;
        let scores = self.in_project_slice.forward(&x)?;
        let temperature = self.temperature.reshape(&[self.heads, 1])?;
        let scaled = match &self.features {
            Features::Own(_) => scores.div(&temperature.unary(TEMPERATURE)?)?,
            Features::Shared(of_points) => {
                let temperature = of_points.forward(&x)?.add(&temperature)?.unary(POINT_TEMPERATURE)?;
                match inputs {
                    [_, noise] => scores.add(noise)?.div(&temperature)?,
                    _ => scores.div(&temperature)?,
                }
            }
        };
        Ok(scaled.softmax(-1)?)
    }

    /// Sums over points, `[batch, heads, slices, features + 1]`.
    fn sums(&self, inputs: &[A], weights: &A) -> Result<A> {
        match (&self.features, self.ahead) {
            (Features::Shared(_), _) => weighted_sums(weights, &self.projected(inputs)?),
            (Features::Own(_), true) => weighted_sums(weights, &inputs[1]),
            (Features::Own(fx), false) => weighted_sums(weights, &fx.forward(&inputs[0], self.heads)?),
        }
    }
}

/// Gumbel noise of a shape that `like` expands to, and of its dtype; none in evaluation.
fn gumbel<A: Array>(like: &A, shape: &[i64], mode: Mode<'_>) -> Result<Option<A>> {
    // In 16 bits, numbers near 1 round to 1, whose noise is the largest of all, and `TINY` beside 1 is lost.
    let full = if like.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let Some(uniform) = mode.uniform(&like.to_kind(full)?.expand(shape)?, 0)? else { return Ok(None) };
    let negative_log = |x: &A| x.add_scalar(TINY)?.unary(Unary::Log)?.unary(Unary::Neg);
    Ok(Some(negative_log(&negative_log(&uniform)?)?.to_kind(like.kind())?))
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
    pub(super) fn new(
        slicing: &'a Recompute<Slicing<A>>,
        x: &A,
        count: usize,
        mode: Mode<'_>,
    ) -> Result<Self> {
        let inputs = slicing.with(|slicing| slicing.inputs(x, mode))?;
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
        let sliced = Sliced::new(&self.slicing, x, self.spec.tiles, mode)?;
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

#[cfg(test)]
mod tests {
    use isobar_array::Generator;
    use rstest::rstest;
    use tch::{Device, Tensor};

    use super::*;

    /// One of 2¹⁴ numbers is above 17 in one of a thousand draws, and the mean is Euler's constant.
    #[rstest]
    fn noise_is_gumbels_in_every_kind(
        #[values(Kind::BFloat16, Kind::Half, Kind::Float, Kind::Double)] kind: Kind,
    ) {
        let (like, generator) = (Tensor::zeros([64, 1], (kind, Device::Cpu)), Generator::new(1));
        let noise = gumbel(&like, &[64, 256], Mode::train(&generator)).unwrap().unwrap();
        assert_eq!((noise.size(), noise.kind()), (vec![64, 256], kind));
        let noise = noise.to_kind(Kind::Double);
        assert!(noise.max().double_value(&[]) < 17.0, "{noise:?}");
        assert!((noise.mean(Kind::Double).double_value(&[]) - 0.5772).abs() < 0.03, "{noise:?}");
        assert!(gumbel(&like, &[64, 256], Mode::Eval).unwrap().is_none());
    }
}
