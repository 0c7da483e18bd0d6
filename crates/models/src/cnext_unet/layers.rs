//! Layers of the network.

use isobar_array::{Array, Conv, Padding, Reduction, Unary};
use isobar_nn::{ConvNd, ConvTransposeNd, LayerNorm, Linear, Mode};
use isobar_shard::{Init, Params, Placement};

use crate::error::Result;
use crate::layers::Recompute;

/// Added to variances, and the least norm that is divided by.
const EPS: f64 = 1e-6;

/// A block of ConvNeXt: x + γ · W₂ gelu(W₁ N(conv₇(x))), the convolution channel by channel, the rest point by point.
#[derive(Debug)]
pub(super) struct Block<A> {
    dwconv: ConvNd<A>,
    norm: LayerNorm<A>,
    pwconv1: Linear<A>,
    pwconv2: Linear<A>,
    gamma: A,
}

impl<A: Array> Block<A> {
    fn new(width: i64, dims: usize, params: &mut impl Params<Array = A>) -> Result<Self> {
        let conv = Conv { padding: Padding::Each(vec![3]), groups: width, ..Conv::default() };
        let gamma = params.param("gamma", &[width], Init::Constant(1e-6), Placement::Replicate)?;
        Ok(Self {
            dwconv: ConvNd::new([width; 2], &vec![7; dims], conv, &mut params.scope("dwconv"))?,
            norm: LayerNorm::with_eps(&[width], EPS, &mut params.scope("norm"))?,
            pwconv1: Linear::new(width, 4 * width, &mut params.scope("pwconv1"))?,
            pwconv2: Linear::new(4 * width, width, &mut params.scope("pwconv2"))?,
            gamma,
        })
    }

    fn forward(&self, x: &A) -> Result<A> {
        let last = x.shape().len() as i64 - 1;
        let channels_last: Vec<i64> = [0].into_iter().chain(2..=last).chain([1]).collect();
        let channels_second: Vec<i64> = [0, last].into_iter().chain(1..last).collect();
        let y = self.norm.forward(&self.dwconv.forward(x)?.permute(&channels_last)?)?;
        let y = self.pwconv2.forward(&self.pwconv1.forward(&y)?.gelu()?)?.mul(&self.gamma)?;
        Ok(x.add(&y.permute(&channels_second)?)?)
    }
}

/// A number of blocks of the same width.
#[derive(Debug)]
pub(super) struct Blocks<A>(Vec<Recompute<Block<A>>>);

impl<A: Array> Blocks<A> {
    pub(super) fn new(
        name: &str,
        (count, width, dims): (usize, i64, usize),
        recomputes: bool,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let block = |i: usize| {
            let name = format!("{name}.blocks.{i}");
            let block = Block::new(width, dims, &mut params.scope(&name))?;
            Ok(Recompute::new(&name, block, recomputes))
        };
        Ok(Self((0..count).map(block).collect::<Result<_>>()?))
    }

    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let mut x = x.shallow_clone();
        for block in &self.0 {
            x = block.forward(&[&x], mode, |block, inputs, _| block.forward(&inputs[0]))?;
        }
        Ok(x)
    }
}

/// Half the extents with twice the channels, or the other way round, of what is normalised point by point.
#[derive(Debug)]
pub(super) struct Resample<A> {
    weight: A,
    conv: Resampling<A>,
}

#[derive(Debug)]
enum Resampling<A> {
    Down(ConvNd<A>),
    Up(ConvTransposeNd<A>),
}

impl<A: Array> Resample<A> {
    pub(super) fn down(width: i64, dims: usize, params: &mut impl Params<Array = A>) -> Result<Self> {
        let weight = Self::norm(width, dims, params)?;
        let params = &mut params.scope("block.1");
        let conv = ConvNd::new([width, 2 * width], &vec![2; dims], halving(), params)?;
        Ok(Self { weight, conv: Resampling::Down(conv) })
    }

    pub(super) fn up(width: i64, dims: usize, params: &mut impl Params<Array = A>) -> Result<Self> {
        let weight = Self::norm(width, dims, params)?;
        let params = &mut params.scope("block.1");
        let conv = ConvTransposeNd::new([width, width / 2], &vec![2; dims], halving(), &[0], params)?;
        Ok(Self { weight, conv: Resampling::Up(conv) })
    }

    fn norm(width: i64, dims: usize, params: &mut impl Params<Array = A>) -> Result<A> {
        let shape = [&[width], &vec![1; dims][..]].concat();
        let params = &mut params.scope("block.0");
        let weight = params.param("weight", &shape, Init::Constant(1.0), Placement::Replicate)?;
        // The Well has it and does not use it.
        params.buffer("bias", &shape, Init::Constant(0.0), Placement::Replicate)?;
        Ok(weight)
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        let norm = x.reduce(Reduction::Norm, &[1], true)?;
        let norm = norm.unary(Unary::Clamp { min: EPS, max: f64::INFINITY })?;
        let x = x.div(&norm)?.mul(&self.weight)?;
        Ok(match &self.conv {
            Resampling::Down(conv) => conv.forward(&x)?,
            Resampling::Up(conv) => conv.forward(&x)?,
        })
    }
}

/// A convolution that keeps the extents.
pub(super) fn same_extents<A: Array>(
    channels: [i64; 2],
    kernel: &[i64],
    params: &mut impl Params<Array = A>,
) -> Result<ConvNd<A>> {
    let padding = kernel.iter().map(|extent| extent / 2).collect();
    let conv = Conv { padding: Padding::Each(padding), ..Conv::default() };
    Ok(ConvNd::new(channels, kernel, conv, params)?)
}

fn halving() -> Conv {
    Conv { stride: vec![2], ..Conv::default() }
}
