//! Group norm, and convolutions that resample.

use isobar_array::{Array, Conv, Padding};
use isobar_nn::{Linear, LinearOptions, Mode};
use isobar_shard::{Init, Params, Placement};

use super::plan::{Style, groups};
use crate::error::Result;
use crate::layers::constant;

/// Group norm. As in PhysicsNeMo, training divides by the biased variance, evaluation by the unbiased one.
#[derive(Debug)]
pub(super) struct Norm<A> {
    eps: f64,
    groups: i64,
    weight: A,
    bias: A,
}

impl<A: Array> Norm<A> {
    pub(super) fn new(channels: i64, style: Style, params: &mut impl Params<Array = A>) -> Result<Self> {
        let groups = groups(channels, style)?;
        let mut vector =
            |name, value| params.param(name, &[channels], Init::Constant(value), Placement::Replicate);
        Ok(Self { eps: style.eps(), groups, weight: vector("weight", 1.0)?, bias: vector("bias", 0.0)? })
    }

    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let (weight, bias) = (&self.weight, Some(&self.bias));
        if mode.is_training() {
            return Ok(x.group_norm(self.groups, Some(weight), bias, self.eps)?);
        }
        // With n elements, var n / (n − 1) + ε = (var + ε (n − 1) / n) n / (n − 1). A group of one element has no such variance, and
        // the result is NaN, as it is in PhysicsNeMo.
        let count: i64 = x.shape()[1..].iter().product::<i64>() / self.groups;
        let ratio = (count - 1) as f64 / count as f64;
        let weight = weight.mul_scalar(ratio.sqrt())?;
        Ok(x.group_norm(self.groups, Some(&weight), bias, self.eps * ratio)?)
    }
}

/// Change of the extents by a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resample {
    Keep,
    /// Halves them before the kernel.
    Down,
    /// Halves them after the kernel.
    DownAfter,
    /// Doubles them before the kernel.
    Up,
}

/// Size and initial values of a convolution.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    /// In and out.
    pub(super) channels: [i64; 2],
    /// Odd extent; 0 for a resampling alone.
    pub(super) extent: i64,
    pub(super) role: Role,
    pub(super) style: Style,
}

/// Role of a convolution, which determines its initial values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Usual,
    /// The last convolution before an addition or the output.
    Last,
    /// The projection to queries, keys and values.
    Attention,
}

impl Kernel {
    pub(super) fn new(style: Style, channels: [i64; 2], extent: i64) -> Self {
        Self { channels, extent, role: Role::Usual, style }
    }

    pub(super) fn of_role(self, role: Role) -> Self {
        Self { role, ..self }
    }

    /// Returns the initial values of weight and bias.
    fn start<A>(&self) -> [Init<A>; 2] {
        let area = self.extent * self.extent;
        match (self.style, self.role) {
            (Style::Song, role) => {
                let scale = match role {
                    Role::Usual => 1.0,
                    Role::Last => SMALL,
                    Role::Attention => 0.2f64.sqrt(),
                };
                [xavier(self.channels, area, scale), Init::Constant(0.0)]
            }
            (Style::Adm, Role::Last) => [Init::Constant(0.0), Init::Constant(0.0)],
            (Style::Adm, _) => [Init::FanIn(self.channels[0] * area), Init::FanIn(self.channels[0] * area)],
        }
    }
}

/// Scale of the initial weights of SongUNet's layers before an addition or the output.
const SMALL: f64 = 1e-5;

/// A convolution that keeps, halves or doubles the extents.
#[derive(Debug)]
pub(super) struct Convolution<A> {
    weights: Option<(A, A)>,
    pad: i64,
    /// `[1, 1, taps, taps]`.
    filter: Option<A>,
    resample: Resample,
}

impl<A: Array> Convolution<A> {
    pub(super) fn new(
        kernel: Kernel,
        (resample, taps): (Resample, &[f64]),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let Kernel { channels: [inputs, outputs], extent, .. } = kernel;
        let weights = match extent {
            0 => None,
            _ => {
                let [weight, bias] = kernel.start();
                let shape = [outputs, inputs, extent, extent];
                let weight = params.param("weight", &shape, weight, Placement::Replicate)?;
                Some((weight, params.param("bias", &[outputs], bias, Placement::Replicate)?))
            }
        };
        let filter = match resample {
            Resample::Keep => None,
            _ => Some(filter(taps, params)?),
        };
        Ok(Self { weights, pad: extent / 2, filter, resample })
    }

    /// A convolution that keeps the extents.
    pub(super) fn plain(kernel: Kernel, params: &mut impl Params<Array = A>) -> Result<Self> {
        Self::new(kernel, (Resample::Keep, &[]), params)
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        match (self.resample, &self.filter) {
            (Resample::Keep, _) | (_, None) => self.convolve(x, self.pad),
            (Resample::Down, Some(filter)) => self.convolve(&down(x, filter, around(filter)?)?, self.pad),
            (Resample::Up, Some(filter)) => self.convolve(&up(x, filter)?, self.pad),
            (Resample::DownAfter, Some(filter)) => {
                // The filter is applied to what the kernel makes beyond the border, too; the bias comes last.
                let wide = around(filter)? + self.pad;
                let Some((weight, bias)) = &self.weights else { return down(x, filter, wide) };
                let y = down(&x.conv(weight, None, &padded(wide))?, filter, 0)?;
                Ok(y.add(&bias.reshape(&[1, -1, 1, 1])?)?)
            }
        }
    }

    fn convolve(&self, x: &A, pad: i64) -> Result<A> {
        match &self.weights {
            Some((weight, bias)) => Ok(x.conv(weight, Some(bias), &padded(pad))?),
            None => Ok(x.shallow_clone()),
        }
    }
}

fn padded(pad: i64) -> Conv {
    Conv { padding: Padding::Each(vec![pad]), ..Conv::default() }
}

/// Zeros around a field that is filtered.
fn around<A: Array>(filter: &A) -> Result<i64> {
    Ok((filter.extent(2)? - 1) / 2)
}

/// Every second point of each filtered channel.
fn down<A: Array>(x: &A, filter: &A, pad: i64) -> Result<A> {
    let (channels, taps) = (x.extent(1)?, filter.extent(2)?);
    let each = filter.expand(&[channels, 1, taps, taps])?;
    Ok(x.conv(&each, None, &Conv { stride: vec![2], groups: channels, ..padded(pad) })?)
}

/// Twice as many points along each dim, each channel apart.
fn up<A: Array>(x: &A, filter: &A) -> Result<A> {
    let (channels, taps) = (x.extent(1)?, filter.extent(2)?);
    let each = filter.mul_scalar(4.0)?.expand(&[channels, 1, taps, taps])?;
    let conv = Conv { stride: vec![2], groups: channels, ..padded(around(filter)?) };
    Ok(x.conv_transpose(&each, None, &conv, &[0])?)
}

/// The buffer of a filter: the products of its taps along both dims.
fn filter<A: Array>(taps: &[f64], params: &mut impl Params<Array = A>) -> Result<A> {
    const NAME: &str = "resample_filter";
    let count = taps.len() as i64;
    let shape = [1, 1, count, count];
    let like = params.draw(NAME, &shape, &Init::Constant(0.0), Placement::Replicate)?;
    let products: Vec<f64> = taps.iter().flat_map(|a| taps.iter().map(move |b| a * b)).collect();
    let products = constant(&products, &shape, &like)?;
    Ok(params.buffer(NAME, &shape, Init::Given(products), Placement::Replicate)?)
}

/// Makes a linear layer with Xavier weights, and a bias of zeros or none; ADM's has PyTorch's initial weights.
pub(super) fn linear<A: Array>(
    style: Style,
    [inputs, outputs]: [i64; 2],
    bias: bool,
    params: &mut impl Params<Array = A>,
) -> Result<Linear<A>> {
    let options = LinearOptions {
        bias,
        weight_init: (style == Style::Song).then(|| xavier([inputs, outputs], 1, 1.0)),
        bias_init: (style == Style::Song).then_some(Init::Constant(0.0)),
        ..Default::default()
    };
    Ok(Linear::with_options(inputs, outputs, options, params)?)
}

fn xavier<A>([inputs, outputs]: [i64; 2], area: i64, scale: f64) -> Init<A> {
    let fans = (inputs as f64 + outputs as f64) * area as f64;
    let bound = scale * (6.0 / fans).sqrt();
    Init::Uniform { low: -bound, high: bound }
}
