//! The residual block, and attention over all points of a level.

use isobar_array::{Array, AttentionOptions};
use isobar_nn::{Dropout, Functional, Linear, Mode};
use isobar_shard::{Params, Scope};

use super::layers::{Convolution, Kernel, Norm, Resample, linear};
use super::plan::Plan;
use crate::error::Result;

/// Initial weights of layers before an addition are scaled by it.
pub(super) const SMALL: f64 = 1e-5;

/// Size of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockSize {
    /// In and out.
    pub(super) channels: [i64; 2],
    pub(super) resample: Resample,
    pub(super) attention: bool,
    pub(super) dropout: f64,
}

/// Two convolutions, modulated by the embedding, and a skip connection; attention after them.
#[derive(Debug)]
pub(super) struct Block<A> {
    norms: [Norm<A>; 2],
    convolutions: [Convolution<A>; 2],
    affine: Linear<A>,
    skip: Option<Convolution<A>>,
    attention: Option<Attention<A>>,
    act: Functional,
    dropout: Dropout,
}

impl<A: Array> Block<A> {
    pub(super) fn new(size: BlockSize, plan: &Plan, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockSize { channels: [inputs, outputs], resample, .. } = size;
        let resampled = (resample, &plan.filter[..]);
        let first = Norm::new(inputs, &mut params.scope("norm0"))?;
        let kernel = Kernel::new(size.channels, 3);
        let conv0 = Convolution::new(kernel, resampled, &mut params.scope("conv0"))?;
        let affine = linear([plan.embedding, outputs], true, &mut params.scope("affine"))?;
        let second = Norm::new(outputs, &mut params.scope("norm1"))?;
        let kernel = Kernel { scale: SMALL, ..Kernel::new([outputs; 2], 3) };
        let conv1 = Convolution::plain(kernel, &mut params.scope("conv1"))?;
        let skip = match inputs != outputs || resample != Resample::Keep {
            true => {
                Some(Convolution::new(Kernel::new(size.channels, 1), resampled, &mut params.scope("skip"))?)
            }
            false => None,
        };
        let attention = match size.attention {
            true => Some(Attention::new(outputs, &mut params.scope("attn"))?),
            false => None,
        };
        Ok(Self {
            norms: [first, second],
            convolutions: [conv0, conv1],
            affine,
            skip,
            attention,
            act: plan.act,
            dropout: Dropout::new(size.dropout)?,
        })
    }

    /// Computes the block of `x` with the embedding `e` `[batch, embedding]` or `[1, embedding]`.
    pub(super) fn forward(&self, x: &A, e: &A, mode: Mode<'_>) -> Result<A> {
        let [norm0, norm1] = &self.norms;
        let [conv0, conv1] = &self.convolutions;
        let inner = conv0.forward(&self.act.forward(&norm0.forward(x, mode)?)?)?;
        let shift = self.affine.forward(e)?;
        let shift = shift.reshape(&[shift.extent(0)?, shift.extent(1)?, 1, 1])?;
        let inner = self.act.forward(&norm1.forward(&inner.add(&shift)?, mode)?)?;
        let inner = conv1.forward(&self.dropout.forward(&inner, mode)?)?;
        let past = match &self.skip {
            Some(skip) => skip.forward(x)?,
            None => x.shallow_clone(),
        };
        let y = inner.add(&past)?.mul_scalar(0.5f64.sqrt())?;
        match &self.attention {
            Some(attention) => Ok(attention.forward(&y, mode)?.mul_scalar(0.5f64.sqrt())?),
            None => Ok(y),
        }
    }
}

/// Attention of one head over all points.
#[derive(Debug)]
struct Attention<A> {
    norm: Norm<A>,
    qkv: Convolution<A>,
    proj: Convolution<A>,
}

impl<A: Array> Attention<A> {
    fn new(channels: i64, params: &mut Scope<'_, A>) -> Result<Self> {
        let norm = Norm::new(channels, &mut params.scope("norm"))?;
        let kernel = Kernel { scale: 0.2f64.sqrt(), ..Kernel::new([channels, 3 * channels], 1) };
        let qkv = Convolution::plain(kernel, &mut params.scope("qkv"))?;
        let kernel = Kernel { scale: SMALL, ..Kernel::new([channels; 2], 1) };
        Ok(Self { norm, qkv, proj: Convolution::plain(kernel, &mut params.scope("proj"))? })
    }

    fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let mut qkv = self.qkv.forward(&self.norm.forward(x, mode)?)?;
        // The order of points does not matter: the dim that more ranks share comes first, so that each rank's are consecutive.
        let turned = x.num_shards(&[3]) > x.num_shards(&[2]);
        if turned {
            qkv = qkv.transpose(2, 3)?;
        }
        let shape = qkv.shape();
        let [batch, channels, rows, columns] = shape[..] else { return Ok(qkv) };
        let features = channels / 3;
        let points = qkv.reshape(&[batch, features, 3, rows * columns])?;
        // Channel 3 c + j is feature c of the query, the key or the value.
        let part = |j: i64| points.select(2, j)?.transpose(1, 2)?.unsqueeze(1);
        let (query, key, value) = (part(0)?, part(1)?, part(2)?);
        let mixed = A::scaled_dot_product_attention(&query, &key, &value, &AttentionOptions::default())?;
        let mut y = mixed.select(1, 0)?.transpose(1, 2)?.reshape(&[batch, features, rows, columns])?;
        if turned {
            y = y.transpose(2, 3)?;
        }
        Ok(self.proj.forward(&y.redistribute_like(x)?)?.add(x)?)
    }
}
