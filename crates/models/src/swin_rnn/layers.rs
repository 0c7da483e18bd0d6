//! Convolutional blocks.

use isobar_array::{Array, Conv, Padding, Unary};
use isobar_nn::{ConvNd, ConvTransposeNd, GroupNorm};
use isobar_shard::Params;

use crate::error::Result;

/// Change of the extents by a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    Half,
    Same,
    Double,
}

/// y = conv(x), plus two convolutions, each with a group norm and SiLU, of y.
#[derive(Debug)]
pub(super) struct ConvBlock<A> {
    conv: Resampling<A>,
    stages: [(ConvNd<A>, GroupNorm<A>); 2],
}

#[derive(Debug)]
enum Resampling<A> {
    Plain(ConvNd<A>),
    Transposed(ConvTransposeNd<A>),
}

impl<A: Array> ConvBlock<A> {
    /// Makes a block of `[in, out]` channels, the latter in `groups`.
    pub(super) fn new(
        channels: [i64; 2],
        groups: i64,
        scale: Scale,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let same = || Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let stride = vec![2];
        let own = &mut params.scope("conv");
        let conv = match scale {
            Scale::Same => Resampling::Plain(ConvNd::new(channels, &[3, 3], same(), own)?),
            Scale::Half => Resampling::Plain(ConvNd::new(channels, &[3, 3], Conv { stride, ..same() }, own)?),
            Scale::Double => {
                let conv = Conv { stride, ..Conv::default() };
                Resampling::Transposed(ConvTransposeNd::new(channels, &[2, 2], conv, &[0], own)?)
            }
        };
        let width = channels[1];
        let mut stage = |i: usize| -> Result<_> {
            let conv = ConvNd::new([width; 2], &[3, 3], same(), &mut params.scope(&format!("b.{i}")))?;
            Ok((conv, GroupNorm::new(groups, width, &mut params.scope(&format!("b.{}", i + 1)))?))
        };
        Ok(Self { conv, stages: [stage(0)?, stage(3)?] })
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        let x = match &self.conv {
            Resampling::Plain(conv) => conv.forward(x)?,
            Resampling::Transposed(conv) => conv.forward(x)?,
        };
        let mut y = x.shallow_clone();
        for (conv, norm) in &self.stages {
            y = norm.forward(&conv.forward(&y)?)?.unary(Unary::Silu)?;
        }
        Ok(x.add(&y)?)
    }
}
