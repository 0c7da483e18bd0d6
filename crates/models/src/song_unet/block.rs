//! The residual block, and attention over all points of a level.

use isobar_array::{Array, AttentionOptions};
use isobar_nn::{Dropout, Functional, Linear, Mode};
use isobar_shard::{Params, Scope};

use super::layers::{Convolution, Kernel, Norm, Resample, Role, linear};
use super::plan::{Plan, Style};
use crate::error::Result;

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
    style: Style,
}

impl<A: Array> Block<A> {
    pub(super) fn new(size: BlockSize, plan: &Plan, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockSize { channels: [inputs, outputs], resample, .. } = size;
        let resampled = (resample, &plan.filter[..]);
        let style = plan.style;
        let first = Norm::new(inputs, style, &mut params.scope("norm0"))?;
        let kernel = Kernel::new(style, size.channels, 3);
        let conv0 = Convolution::new(kernel, resampled, &mut params.scope("conv0"))?;
        let vectors = if style == Style::Adm { 2 } else { 1 };
        let affine = linear(style, [plan.embedding, vectors * outputs], true, &mut params.scope("affine"))?;
        let second = Norm::new(outputs, style, &mut params.scope("norm1"))?;
        let kernel = Kernel::new(style, [outputs; 2], 3).of_role(Role::Last);
        let conv1 = Convolution::plain(kernel, &mut params.scope("conv1"))?;
        let skip = match inputs != outputs || resample != Resample::Keep {
            true => {
                // ADM's skip has no weights if the number of channels stays the same.
                let extent = i64::from(style == Style::Song || inputs != outputs);
                let kernel = Kernel::new(style, size.channels, extent);
                Some(Convolution::new(kernel, resampled, &mut params.scope("skip"))?)
            }
            false => None,
        };
        let attention = match size.attention {
            true => Some(Attention::new(outputs, style, &mut params.scope("attn"))?),
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
            style,
        })
    }

    /// Computes the block of `x` with the embedding `e` `[batch, embedding]` or `[1, embedding]`.
    pub(super) fn forward(&self, x: &A, e: &A, mode: Mode<'_>) -> Result<A> {
        let [norm0, norm1] = &self.norms;
        let [conv0, conv1] = &self.convolutions;
        let inner = conv0.forward(&self.act.forward(&norm0.forward(x, mode)?)?)?;
        let vectors = self.affine.forward(e)?;
        let vectors = vectors.reshape(&[vectors.extent(0)?, vectors.extent(1)?, 1, 1])?;
        let inner = match self.style {
            Style::Song => norm1.forward(&inner.add(&vectors)?, mode)?,
            Style::Adm => {
                let channels = vectors.extent(1)? / 2;
                let [scale, shift] =
                    [vectors.narrow(1, 0, channels)?, vectors.narrow(1, channels, channels)?];
                norm1.forward(&inner, mode)?.mul(&scale.add_scalar(1.0)?)?.add(&shift)?
            }
        };
        let inner = self.act.forward(&inner)?;
        let inner = conv1.forward(&self.dropout.forward(&inner, mode)?)?;
        let past = match &self.skip {
            Some(skip) => skip.forward(x)?,
            None => x.shallow_clone(),
        };
        // SongUNet scales sums so that the variance is kept.
        let scaled = |x: A| match self.style {
            Style::Song => x.mul_scalar(0.5f64.sqrt()),
            Style::Adm => Ok(x),
        };
        let y = scaled(inner.add(&past)?)?;
        match &self.attention {
            Some(attention) => Ok(scaled(attention.forward(&y, mode)?)?),
            None => Ok(y),
        }
    }
}

/// Attention over all points.
#[derive(Debug)]
struct Attention<A> {
    heads: i64,
    norm: Norm<A>,
    qkv: Convolution<A>,
    proj: Convolution<A>,
}

impl<A: Array> Attention<A> {
    fn new(channels: i64, style: Style, params: &mut Scope<'_, A>) -> Result<Self> {
        let norm = Norm::new(channels, style, &mut params.scope("norm"))?;
        let kernel = Kernel::new(style, [channels, 3 * channels], 1).of_role(Role::Attention);
        let qkv = Convolution::plain(kernel, &mut params.scope("qkv"))?;
        let kernel = Kernel::new(style, [channels; 2], 1).of_role(Role::Last);
        Ok(Self {
            heads: style.heads(channels),
            norm,
            qkv,
            proj: Convolution::plain(kernel, &mut params.scope("proj"))?,
        })
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
        let points = qkv.reshape(&[batch, self.heads, features / self.heads, 3, rows * columns])?;
        // Channel 3 c + j is feature c, counted over all heads, of the query (j = 0), the key (1) or the value (2).
        let part = |j: i64| points.select(3, j)?.transpose(2, 3);
        let (query, key, value) = (part(0)?, part(1)?, part(2)?);
        let mixed = A::scaled_dot_product_attention(&query, &key, &value, &AttentionOptions::default())?;
        let mut y = mixed.transpose(2, 3)?.reshape(&[batch, features, rows, columns])?;
        if turned {
            y = y.transpose(2, 3)?;
        }
        Ok(self.proj.forward(&y.redistribute_like(x)?)?.add(x)?)
    }
}
