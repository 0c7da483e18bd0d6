//! Layers of the network.

use isobar_array::{Array, Conv, Padding, Resample};
use isobar_nn::{Activation, ActivationLayer, BatchNorm, ConvNd, Mode};
use isobar_shard::{Params, Scope};

use super::{SPATIAL, SrResNetPadding};
use crate::error::Result;

/// A convolution and a batch norm.
#[derive(Debug)]
pub(super) struct Normed<A> {
    conv: ConvNd<A>,
    norm: BatchNorm<A>,
}

impl<A: Array> Normed<A> {
    pub(super) fn new(width: i64, kernel: i64, params: &mut Scope<'_, A>) -> Result<Self> {
        let conv = conv([width; 2], kernel, &mut params.scope("0"))?;
        Ok(Self { conv, norm: BatchNorm::new(width, &mut params.scope("1"))? })
    }

    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        Ok(self.norm.forward(&self.conv.forward(x)?, mode)?)
    }
}

/// Two of them with an activation between, and what goes past.
#[derive(Debug)]
pub(super) struct Residual<A> {
    pub(super) first: Normed<A>,
    pub(super) activation: ActivationLayer<A>,
    pub(super) second: Normed<A>,
}

impl<A: Array> Residual<A> {
    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let inner = self.activation.forward(&self.first.forward(x, mode)?)?;
        Ok(self.second.forward(&inner, mode)?.add(x)?)
    }
}

/// A convolution to eight times the channels, which become twice the extents.
#[derive(Debug)]
pub(super) struct Shuffle<A> {
    conv: ConvNd<A>,
    prelu: ActivationLayer<A>,
}

impl<A: Array> Shuffle<A> {
    pub(super) fn new(width: i64, kernel: i64, params: &mut Scope<'_, A>) -> Result<Self> {
        let conv = conv([width, width << SPATIAL], kernel, &mut params.scope("conv"))?;
        Ok(Self { conv, prelu: ActivationLayer::new(Activation::Prelu, &mut params.scope("prelu"))? })
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        Ok(self.prelu.forward(&self.conv.forward(x)?.pixel_shuffle(2)?)?)
    }
}

/// A convolution that keeps the extents.
fn conv<A: Array>(channels: [i64; 2], kernel: i64, params: &mut Scope<'_, A>) -> Result<ConvNd<A>> {
    let padding = if kernel % 2 == 1 { SrResNetPadding::Half } else { SrResNetPadding::Same };
    padded(channels, kernel, padding, params)
}

/// A convolution. With half an even kernel on both sides, the result has one more point along each dim.
pub(super) fn padded<A: Array>(
    channels: [i64; 2],
    kernel: i64,
    padding: SrResNetPadding,
    params: &mut Scope<'_, A>,
) -> Result<ConvNd<A>> {
    let padding = match padding {
        SrResNetPadding::Half => Padding::Each(vec![kernel / 2]),
        SrResNetPadding::Same => Padding::Same,
    };
    let conv = Conv { padding, ..Conv::default() };
    Ok(ConvNd::new(channels, &[kernel; SPATIAL], conv, params)?)
}
