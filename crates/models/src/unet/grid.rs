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
    /// As many as keep the extents, with a stride of 1.
    Keyword(UNetPaddingKeyword),
    /// On both sides.
    Elements(PerDim),
}

/// Padding by a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UNetPaddingKeyword {
    /// As many elements as keep the extents; of an odd number, the extra one comes at the end.
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
                check.ensure(stride.iter().all(|&stride| stride == 1), || {
                    format!("stride is {stride:?}, but padding = \"same\" needs 1; --set model.stride=1")
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

    /// The convolutions.
    pub(super) fn conv(&self, padding_mode: PadMode) -> Conv {
        let (padding, none) = match &self.padding {
            None => (Padding::Same, self.kernel.iter().all(|&kernel| kernel == 1)),
            Some(padding) => (Padding::Each(padding.clone()), padding.iter().all(|&elements| elements == 0)),
        };
        let padding_mode = if none { PadMode::Constant } else { padding_mode };
        Conv { stride: self.stride.clone(), padding, padding_mode, ..Conv::default() }
    }

    /// Returns whether convolutions keep the extents.
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
