//! Options of convolutions.

use super::pad::PadMode;
use crate::registry::Attrs;

/// Padding around the input of a convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Padding {
    /// Number of elements before and after, for each dim or for all.
    Each(Vec<i64>),
    /// "same" padding: the result has the input's extents, and the extra element goes at the end; for stride 1.
    Same,
}

/// Options of a convolution. Lists have one value for each spatial dim, or one for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conv {
    /// Step between outputs.
    pub stride: Vec<i64>,
    /// Padding around the input.
    pub padding: Padding,
    /// Step between the kernel's elements.
    pub dilation: Vec<i64>,
    /// Number of independent groups of channels.
    pub groups: i64,
    /// Values of the padding.
    pub padding_mode: PadMode,
}

impl Default for Conv {
    fn default() -> Self {
        Self {
            stride: vec![1],
            padding: Padding::Each(vec![0]),
            dilation: vec![1],
            groups: 1,
            padding_mode: PadMode::Constant,
        }
    }
}

impl Conv {
    /// Returns the fields by PyTorch's names.
    pub fn args(&self) -> Attrs {
        let padding = match &self.padding {
            Padding::Each(widths) => serde_json::json!(widths),
            Padding::Same => "same".into(),
        };
        // PyTorch's convolutions call zeros what its padding calls a constant.
        let mode = if self.padding_mode == PadMode::Constant { "zeros" } else { self.padding_mode.name() };
        args!(
            "stride": self.stride,
            "padding": padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "padding_mode": mode,
        )()
    }
}
