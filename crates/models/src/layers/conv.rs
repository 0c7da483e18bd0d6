//! Convolutions with their weights.

use isobar_array::{Array, Conv};
use isobar_shard::{Init, Params, Placement};

use crate::error::Result;

/// A convolution with a weight and a bias, which start as PyTorch's do.
#[derive(Debug)]
pub(crate) struct ConvLayer<A> {
    weight: A,
    bias: A,
    conv: Conv,
}

impl<A: Array> ConvLayer<A> {
    /// From and to so many channels, with a kernel of these extents.
    pub(crate) fn new(
        [inputs, outputs]: [i64; 2],
        kernel: &[i64],
        conv: Conv,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let shape = [&[outputs, inputs], kernel].concat();
        let fan = fan(inputs, kernel);
        let weight = params.param("weight", &shape, Init::FanIn(fan), Placement::Replicate)?;
        let bias = params.param("bias", &[outputs], Init::FanIn(fan), Placement::Replicate)?;
        Ok(Self { weight, bias, conv })
    }

    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        Ok(x.conv(&self.weight, Some(&self.bias), &self.conv)?)
    }
}

/// A transposed convolution with a weight and a bias, which start as PyTorch's do.
#[derive(Debug)]
pub(crate) struct ConvTransposeLayer<A> {
    weight: A,
    bias: A,
    conv: Conv,
    output_padding: i64,
}

impl<A: Array> ConvTransposeLayer<A> {
    /// From and to so many channels, with a kernel of these extents.
    pub(crate) fn new(
        [inputs, outputs]: [i64; 2],
        kernel: &[i64],
        (conv, output_padding): (Conv, i64),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let shape = [&[inputs, outputs], kernel].concat();
        let fan = fan(outputs, kernel);
        let weight = params.param("weight", &shape, Init::FanIn(fan), Placement::Replicate)?;
        let bias = params.param("bias", &[outputs], Init::FanIn(fan), Placement::Replicate)?;
        Ok(Self { weight, bias, conv, output_padding })
    }

    pub(crate) fn forward(&self, x: &A) -> Result<A> {
        Ok(x.conv_transpose(&self.weight, Some(&self.bias), &self.conv, &[self.output_padding])?)
    }
}

/// Number of inputs of an output element. Saturates: kernels that large are refused for their memory.
fn fan(channels: i64, kernel: &[i64]) -> i64 {
    kernel.iter().fold(channels, |fan, &extent| fan.saturating_mul(extent))
}
