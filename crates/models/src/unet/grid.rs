//! Padding of the convolutions, and the extents of the levels that follow from it.

use isobar_array::{Conv, PadMode, Padding};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::UNetConfig;
use crate::error::{Checker, Result};
use crate::layers::PerDim;

/// Elements around the input of the convolutions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected \"same\", a number, or a list of one for each dim")]
pub enum UNetPadding {
    /// As many as keep the extents.
    Keyword(UNetPaddingKeyword),
    /// On both sides.
    Elements(PerDim),
}

/// Padding by a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UNetPaddingKeyword {
    /// Padding with which a convolution maps n points to ⌈n / stride⌉; the extra element of an odd number goes at the end.
    Same,
}

impl UNetPadding {
    /// Padding that keeps the extents, of even kernels too.
    pub const SAME: Self = Self::Keyword(UNetPaddingKeyword::Same);
}

impl From<PerDim> for UNetPadding {
    fn from(elements: PerDim) -> Self {
        Self::Elements(elements)
    }
}

/// Half of the network.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    Encoder,
    Decoder,
}

/// Extents of the convolutions, and of the levels.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    /// One for each spatial dim, as `stride` and, unless it is `None`, `padding`.
    pub(super) kernel: Vec<i64>,
    stride: Vec<i64>,
    padding: Option<Vec<i64>>,
    levels: usize,
    blocks: usize,
    pool: i64,
    interpolates: bool,
}

impl Grid {
    pub(super) fn new(config: &UNetConfig, check: &Checker, pool: i64, interpolates: bool) -> Result<Self> {
        let dims = config.dimension;
        let each = |name: &str, given: &PerDim| -> Result<Vec<usize>> {
            let list = given.list(dims);
            check.ensure(list.len() == dims, || {
                format!("{name} has {} entries, dimension is {dims}", list.len())
            })?;
            Ok(list)
        };
        let extents = |name: &str, given: &PerDim| -> Result<Vec<i64>> {
            each(name, given)?.into_iter().map(|value| check.extent(name, value)).collect()
        };
        let (kernel, stride) =
            (extents("kernel_size", &config.kernel_size)?, extents("stride", &config.stride)?);
        let padding = match &config.padding {
            UNetPadding::Elements(elements) => {
                let elements = each("padding", elements)?.into_iter();
                let padding: Result<Vec<i64>> = elements
                    .map(|elements| if elements == 0 { Ok(0) } else { check.extent("padding", elements) })
                    .collect();
                Some(padding?)
            }
            UNetPadding::Keyword(UNetPaddingKeyword::Same) => {
                check.ensure(interpolates || stride.iter().all(|&stride| stride == 1), || {
                    format!(
                        "stride is {stride:?}, but with padding = \"same\" transposed convolutions need 1; \
                         --set 'model.upsampling=\"linear\"' or --set model.stride=1"
                    )
                })?;
                None
            }
        };
        Ok(Self {
            kernel,
            stride,
            padding,
            levels: config.model_depth,
            blocks: config.num_conv_blocks,
            pool,
            interpolates,
        })
    }

    /// The convolutions of the encoder or of the decoder, which have no stride with "same" padding.
    pub(super) fn conv(&self, padding_mode: PadMode, side: Side) -> Conv {
        let (padding, none) = match &self.padding {
            None => (Padding::Same, self.kernel.iter().all(|&kernel| kernel == 1)),
            Some(padding) => (Padding::Each(padding.clone()), padding.iter().all(|&elements| elements == 0)),
        };
        let padding_mode = if none { PadMode::Constant } else { padding_mode };
        match (side, &self.padding) {
            (Side::Decoder, None) => Conv { padding, padding_mode, ..Conv::default() },
            _ if self.pads_first(side) => Conv { stride: self.stride.clone(), ..Conv::default() },
            _ => Conv { stride: self.stride.clone(), padding, padding_mode, ..Conv::default() },
        }
    }

    /// Returns whether the input is padded before a convolution: "same" padding of a convolution is for stride 1.
    fn pads_first(&self, side: Side) -> bool {
        matches!(side, Side::Encoder) && self.padding.is_none() && self.coarsening() > 1
    }

    /// Elements to add at both ends before a convolution, from the last dim backwards; `None` where the convolution pads.
    pub(super) fn pairs_before(&self, side: Side) -> Option<Vec<i64>> {
        let pairs = || self.kernel.iter().rev().flat_map(|kernel| [(kernel - 1) / 2, kernel / 2]).collect();
        self.pads_first(side).then(pairs)
    }

    /// Factor by which the strides of a level divide its extents, along the dim where it is largest.
    pub(super) fn coarsening(&self) -> i64 {
        let stride = self.stride.iter().max().copied().unwrap_or(1);
        stride.saturating_pow(self.blocks as u32)
    }

    /// Returns whether upsampling brings each level to the extents of its skip connection, and the output to those of the input.
    pub(super) fn resizes(&self) -> bool {
        self.interpolates && self.keeps_extents()
    }

    /// Returns whether so many levels accept fields of these extents, where the output [keeps](Self::keeps_extents) them.
    pub(super) fn accepts(&self, extents: &[i64], levels: usize) -> bool {
        if !self.resizes() {
            let factor = self.pool.saturating_pow(levels.saturating_sub(1) as u32);
            return extents.iter().all(|&extent| extent > 0 && extent % factor == 0);
        }
        extents.iter().zip(&self.stride).all(|(&extent, &stride)| {
            let mut extent = extent;
            for level in 0..levels {
                extent /= if level > 0 { self.pool } else { 1 };
                if extent < 1 {
                    return false;
                }
                extent = (0..self.blocks).fold(extent, |extent, _| (extent - 1) / stride + 1);
            }
            true
        })
    }

    /// Returns whether the output has the extents of the input.
    pub(super) fn keeps_extents(&self) -> bool {
        let Some(padding) = &self.padding else { return true };
        let keeps =
            |((kernel, stride), padding): ((&i64, &i64), &i64)| *stride == 1 && 2 * padding + 1 == *kernel;
        self.kernel.iter().zip(&self.stride).zip(padding).all(keeps)
    }

    /// Returns the extents of the output for those of the input, or the reason why there is none.
    pub(super) fn output(&self, extents: &[i64]) -> Result<Vec<i64>, String> {
        extents.iter().enumerate().map(|(dim, &extent)| self.output_along(dim, extent)).collect()
    }

    fn output_along(&self, dim: usize, extent: i64) -> Result<i64, String> {
        let mut extent = extent;
        let mut skips = Vec::new();
        for level in 0..self.levels {
            if level > 0 {
                skips.push(extent);
                extent /= self.pool;
            }
            extent = self.convolved(dim, extent, self.blocks)?;
        }
        while let Some(skip) = skips.pop() {
            extent *= self.pool;
            if self.interpolates {
                extent = self.convolved(dim, extent, 1)?;
            }
            if extent != skip {
                return Err(format!(
                    "{extent} points after upsampling to level {}, expected {skip} along dim {dim}",
                    skips.len()
                ));
            }
            extent = self.convolved(dim, extent, self.blocks)?;
        }
        self.convolved(dim, extent, 1)
    }

    /// The extents that it expects, in words, where the output keeps them.
    pub(super) fn expected(&self, factor: i64) -> String {
        if !self.resizes() {
            return format!("extents divisible by {factor}");
        }
        let least: Vec<i64> = self.stride.iter().map(|&stride| self.least(stride)).collect();
        match least.windows(2).all(|pair| pair[0] == pair[1]) {
            true => format!("extents of at least {}", least.first().copied().unwrap_or(1)),
            false => format!("extents of at least {least:?}"),
        }
    }

    /// Smallest extent that leaves a point on the lowest level, along a dim with this stride.
    fn least(&self, stride: i64) -> i64 {
        (1..self.levels).fold(1, |below: i64, _| {
            (0..self.blocks).fold(below.saturating_mul(self.pool), |extent, _| {
                (extent - 1).saturating_mul(stride).saturating_add(1)
            })
        })
    }

    /// Extent after so many convolutions.
    fn convolved(&self, dim: usize, extent: i64, times: usize) -> Result<i64, String> {
        let mut extent = extent;
        for _ in 0..times {
            let (kernel, stride) = (self.kernel[dim], self.stride[dim]);
            let around = self.padding.as_ref().map_or(kernel - 1, |padding| 2 * padding[dim]);
            if extent < 1 || extent + around < kernel {
                return Err(format!("{extent} points remain along dim {dim} for a kernel of {kernel}"));
            }
            extent = (extent + around - kernel) / stride + 1;
        }
        Ok(extent)
    }

    /// The arguments that determine the extents, and how to keep these.
    pub(super) fn describe(&self) -> String {
        let padding = self.padding.as_ref().map_or_else(|| "\"same\"".to_owned(), |list| format!("{list:?}"));
        format!("kernel_size {:?}, stride {:?} and padding {padding}", self.kernel, self.stride)
    }
}
