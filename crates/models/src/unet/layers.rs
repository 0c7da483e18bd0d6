//! Layers of a level of the U-Net.

use isobar_array::{Array, Conv, Interpolation, PadMode, Padding, Resize, Unary};
use isobar_nn::{BatchNorm, ConvNd, ConvTransposeNd, Functional, GroupNorm, LayerNorm, Mode};
use isobar_shard::{Params, Scope};

use super::config::{GroupNorm as GroupNormPlan, Normalization, Plan, UNetConfig};
use super::grid::Side;
use crate::error::Result;

/// A convolution, a normalisation, an activation.
#[derive(Debug)]
pub(super) struct Block<A> {
    /// Padding before the convolution, if it does not pad itself.
    pad: Option<(Vec<i64>, PadMode)>,
    conv: ConvNd<A>,
    norm: Norm<A>,
    activation: Option<Functional>,
}

#[derive(Debug)]
enum Norm<A> {
    Group(GroupNorm<A>),
    Batch(BatchNorm<A>),
    /// Over the channels at each point.
    Layer(LayerNorm<A>),
    None,
}

impl<A: Array> Block<A> {
    /// From and to so many channels.
    pub(super) fn new(
        config: &UNetConfig,
        (plan, side): (&Plan, Side),
        channels: [i64; 2],
        params: &mut Scope<'_, A>,
    ) -> Result<Self> {
        let conv = block_conv(plan, side, channels, params)?;
        let mut norm_params = params.scope("norm");
        let norm = match config.normalization {
            Normalization::GroupNorm => {
                let GroupNormPlan { groups, eps, affine } = plan.group_norm;
                Norm::Group(match affine {
                    true => GroupNorm::with_eps(groups, channels[1], eps, &mut norm_params)?,
                    false => GroupNorm::without_affine(groups, channels[1], eps)?,
                })
            }
            Normalization::BatchNorm => Norm::Batch(BatchNorm::new(channels[1], &mut norm_params)?),
            Normalization::LayerNorm => Norm::Layer(LayerNorm::new(&channels[1..], &mut norm_params)?),
            Normalization::None => Norm::None,
        };
        let pad = plan.grid.pairs_before(side).map(|pairs| (pairs, plan.padding_mode));
        Ok(Self { pad, conv, norm, activation: Some(plan.activation) })
    }

    /// A convolution of the decoder alone.
    pub(super) fn plain(plan: &Plan, channels: [i64; 2], params: &mut Scope<'_, A>) -> Result<Self> {
        let conv = block_conv(plan, Side::Decoder, channels, params)?;
        Ok(Self { pad: None, conv, norm: Norm::None, activation: None })
    }

    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let x = match &self.pad {
            Some((pairs, padding)) => self.conv.forward(&x.pad_mode(pairs, *padding, 0.0)?)?,
            None => self.conv.forward(x)?,
        };
        let x = match &self.norm {
            Norm::Group(norm) => norm.forward(&x)?,
            Norm::Batch(norm) => norm.forward(&x, mode)?,
            Norm::Layer(norm) => norm.forward_channels_first(&x)?,
            Norm::None => x,
        };
        Ok(self.activation.map_or_else(|| Ok(x.shallow_clone()), |activation| activation.forward(&x))?)
    }
}

/// From a level to the one above.
#[derive(Debug)]
pub(super) struct Upsample<A> {
    conv: UpsampleMode<A>,
    activation: Functional,
}

#[derive(Debug)]
enum UpsampleMode<A> {
    Transposed(ConvTransposeNd<A>),
    /// To `scale` times the extents, or to given ones without a scale.
    Interpolated {
        mode: Interpolation,
        scale: Option<f64>,
        conv: ConvNd<A>,
    },
}

impl<A: Array> Upsample<A> {
    pub(super) fn new(
        config: &UNetConfig,
        plan: &Plan,
        channels: i64,
        params: &mut Scope<'_, A>,
    ) -> Result<Self> {
        let both = [channels; 2];
        let conv = match config.upsampling.interpolation() {
            Some(mode) => UpsampleMode::Interpolated {
                mode,
                scale: (!plan.grid.resizes()).then_some(plan.pool as f64),
                conv: block_conv(plan, Side::Decoder, both, params)?,
            },
            None => {
                let conv = Conv { stride: vec![2], padding: Padding::Each(vec![1]), ..Conv::default() };
                let mut params = params.scope(&format!("conv{}d_transpose", plan.spatial));
                UpsampleMode::Transposed(ConvTransposeNd::new(
                    both,
                    &vec![3; plan.spatial],
                    conv,
                    &[1],
                    &mut params,
                )?)
            }
        };
        Ok(Self { conv, activation: plan.up_activation })
    }

    /// Upsamples `x`, where it interpolates to the extents of `skip`.
    pub(super) fn forward(&self, x: &A, skip: &A) -> Result<A> {
        let x = match &self.conv {
            UpsampleMode::Transposed(conv) => conv.forward(x)?,
            UpsampleMode::Interpolated { mode, scale, conv } => {
                let size = scale.map_or_else(
                    || Resize::Size(skip.shape()[2..].to_vec()),
                    |scale| Resize::Scale(vec![scale]),
                );
                conv.forward(&x.interpolate(&size, *mode, false)?)?
            }
        };
        Ok(self.activation.forward(&x)?)
    }
}

/// Attention gate: weighs a skip connection by features of the level below.
#[derive(Debug)]
pub(super) struct Gate<A> {
    below: Point<A>,
    skip: Point<A>,
    weight: Point<A>,
}

/// A linear map of the channels at each point, and their layer norm.
#[derive(Debug)]
struct Point<A> {
    conv: ConvNd<A>,
    norm: LayerNorm<A>,
}

impl<A: Array> Gate<A> {
    /// From so many channels of what comes from below and of the skip, over so many inside.
    pub(super) fn new(
        [below, skip, inner]: [i64; 3],
        spatial: usize,
        params: &mut Scope<'_, A>,
    ) -> Result<Self> {
        let mut point = |name, channels: [i64; 2]| -> Result<Point<A>> {
            let mut params = params.scope(name);
            let kernel = vec![1; spatial];
            let conv = ConvNd::new(channels, &kernel, Conv::default(), &mut params.scope("0"))?;
            Ok(Point { conv, norm: LayerNorm::new(&channels[1..], &mut params.scope("1"))? })
        };
        let below = point("W_g", [below, inner])?;
        let skip = point("W_x", [skip, inner])?;
        Ok(Self { below, skip, weight: point("psi", [inner, 1])? })
    }

    pub(super) fn forward(&self, below: &A, skip: &A) -> Result<A> {
        let inner = self.below.forward(below)?.add(&self.skip.forward(skip)?)?.relu()?;
        let weight = self.weight.forward(&inner)?.unary(Unary::Sigmoid)?;
        Ok(skip.mul(&weight)?)
    }
}

impl<A: Array> Point<A> {
    fn forward(&self, x: &A) -> Result<A> {
        Ok(self.norm.forward_channels_first(&self.conv.forward(x)?)?)
    }
}

/// One of the blocks' convolutions.
fn block_conv<A: Array>(
    plan: &Plan,
    side: Side,
    channels: [i64; 2],
    params: &mut Scope<'_, A>,
) -> Result<ConvNd<A>> {
    let mut params = params.scope(&format!("conv{}d", plan.spatial));
    Ok(ConvNd::new(channels, &plan.grid.kernel, plan.grid.conv(plan.padding_mode, side), &mut params)?)
}
