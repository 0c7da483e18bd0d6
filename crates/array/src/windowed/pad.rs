//! Padding of dense tensors.

use tch::Tensor;

use crate::error::{Result, named, refuse};

const OP: &str = "pad";

/// Values of the padding around a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PadMode {
    /// A constant.
    #[default]
    Constant,
    /// The elements of the other end: the dim is periodic.
    Circular,
    /// The elements mirrored at the last one, which comes once.
    Reflect,
    /// The last element.
    Replicate,
}

impl PadMode {
    /// PyTorch's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Circular => "circular",
            Self::Reflect => "reflect",
            Self::Replicate => "replicate",
        }
    }

    /// Checks the widths of the padding along one dim, as libtorch does.
    ///
    /// # Errors
    ///
    /// The mode has no such widths.
    pub fn check(self, op: &'static str, extent: i64, before: i64, after: i64) -> Result<()> {
        let (wide, limit) = (before.max(after), extent);
        let fits = match self {
            Self::Constant => true,
            Self::Circular => wide <= limit,
            Self::Reflect => wide < limit,
            Self::Replicate => wide <= 0 || limit > 0,
        };
        match fits {
            true => Ok(()),
            false => refuse(op, format!("padding of {wide} elements is too wide for {self:?} of {extent}")),
        }
    }

    /// Resolves pairs, from the last dim backwards, to dims of a shape.
    ///
    /// # Errors
    ///
    /// Pairs that do not fit the shape.
    pub fn borders(self, shape: &[i64], pairs: &[i64]) -> Result<Vec<Around>> {
        if !pairs.len().is_multiple_of(2) || pairs.len() / 2 > shape.len() {
            return refuse(OP, format!("{pairs:?} are not pairs for the last of {} dims", shape.len()));
        }
        let around = |(index, pair): (usize, &[i64])| {
            let (dim, before, after) = (shape.len() - 1 - index, pair[0], pair[1]);
            let result = shape[dim] + before + after;
            if result < 0 {
                return refuse(OP, format!("{pairs:?} leaves an extent of {result} along dim {dim}"));
            }
            self.check(OP, shape[dim], before, after)?;
            Ok(Around { dim, before, after })
        };
        pairs.chunks_exact(2).enumerate().map(around).collect()
    }

    /// Splits the pairs into those that crop and those that pad, if circular padding does both along a dim. Cropping comes first, as in
    /// PyTorch, so that cropped elements do not reappear on the other side.
    pub fn cut_first(self, pairs: &[i64]) -> Option<[Vec<i64>; 2]> {
        let is_mixed = |pair: &[i64]| pair.iter().any(|&side| side < 0) && pair.iter().any(|&side| side > 0);
        (self == Self::Circular && pairs.chunks_exact(2).any(is_mixed)).then(|| {
            let part = |of: fn(i64, i64) -> i64| pairs.iter().map(|&side| of(side, 0)).collect();
            [part(i64::min), part(i64::max)]
        })
    }

    /// Pads a tensor.
    ///
    /// # Errors
    ///
    /// Pairs that do not fit the tensor.
    ///
    /// ```
    /// use isobar_array::PadMode;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0]);
    /// assert_eq!(PadMode::Replicate.pad(&x, &[1, 2], 0.0)?, Tensor::from_slice(&[1.0, 1.0, 2.0, 3.0, 3.0, 3.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn pad(self, x: &Tensor, pairs: &[i64], value: f64) -> Result<Tensor> {
        self.borders(&x.size(), pairs)?;
        if let Some([cut, add]) = self.cut_first(pairs) {
            return self.pad(&Self::Constant.pad(x, &cut, 0.0)?, &add, value);
        }
        if self == Self::Constant {
            return named(OP, &[x], x.f_pad(pairs, self.name(), value));
        }
        // libtorch has the other modes for some numbers of dims only.
        let mut padded = x.shallow_clone();
        for (index, pair) in pairs.chunks_exact(2).enumerate().filter(|(_, pair)| **pair != [0, 0]) {
            let dim = x.dim() - 1 - index;
            let extent = x.size()[dim];
            let source = |at: i64| match self {
                Self::Circular => at.rem_euclid(extent),
                Self::Replicate => at.clamp(0, extent - 1),
                _ if at < 0 => -at,
                _ => at.min(2 * (extent - 1) - at),
            };
            let sources: Vec<i64> = (-pair[0]..extent + pair[1]).map(source).collect();
            let chosen = Tensor::f_from_slice(&sources)
                .and_then(|sources| padded.f_index_select(dim as i64, &sources.f_to_device(x.device())?));
            padded = named(OP, &[x], chosen)?;
        }
        Ok(padded)
    }
}

/// Padding along one dim.
#[derive(Debug, Clone, Copy)]
pub struct Around {
    /// The dim.
    pub dim: usize,
    /// Number of elements before the first.
    pub before: i64,
    /// Number of elements after the last.
    pub after: i64,
}
