//! Sums and other statistics.

use tch::{Reduction as TorchReduction, Tensor};

use super::{named, resolve};
use crate::error::Result;

/// A statistic of many numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Σ x
    Sum,
    /// Σ x / n
    Mean,
    /// The greatest.
    Max,
    /// The least.
    Min,
    /// √(Σ x²)
    Norm,
}

/// A statistic along dims, with its options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Statistic {
    /// Σ x
    Sum,
    /// Σ x / n
    Mean,
    /// Π x
    Prod,
    /// The greatest; its gradient is split evenly among equal ones.
    Max,
    /// The least; its gradient is split evenly among equal ones.
    Min,
    /// Σ (x − mean)² / (n − correction)
    Var {
        /// 1 for the unbiased estimate, which is libtorch's default.
        correction: i64,
    },
    /// √ of the variance
    Std {
        /// Correction, as for the variance.
        correction: i64,
    },
    /// √(Σ x²)
    Norm,
    /// ln Σ eˣ
    LogSumExp,
    /// True if any element is not zero.
    Any,
    /// True if all elements are not zero.
    All,
}

impl Statistic {
    /// PyTorch's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Prod => "prod",
            Self::Max => "amax",
            Self::Min => "amin",
            Self::Var { .. } => "var",
            Self::Std { .. } => "std",
            Self::Norm => "norm",
            Self::LogSumExp => "logsumexp",
            Self::Any => "any",
            Self::All => "all",
        }
    }

    /// Returns the correction of a variance or standard deviation.
    pub fn correction(self) -> Option<i64> {
        match self {
            Self::Var { correction } | Self::Std { correction } => Some(correction),
            _ => None,
        }
    }
}

/// Statistics along dims.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: dims that do not exist, kinds without the statistic"
)]
pub trait Reduce: Sized {
    /// `statistic` over `dims`, which stay with extent 1 where `keepdim`; no dims means all of them.
    fn reduce(&self, statistic: Reduction, dims: &[i64], keepdim: bool) -> Result<Self>;

    /// This array plus, at the places along `dim` that `index` (`Int64`, one dim) names, the elements of `source`.
    fn index_add(&self, dim: i64, index: &Self, source: &Self) -> Result<Self>;

    /// Mean over all elements of (x − target)².
    fn mse_loss(&self, target: &Self) -> Result<Self>;

    /// The sum of all elements.
    fn sum(&self) -> Result<Self> {
        self.reduce(Reduction::Sum, &[], false)
    }

    /// The mean of all elements.
    fn mean(&self) -> Result<Self> {
        self.reduce(Reduction::Mean, &[], false)
    }
}

impl Reduce for Tensor {
    fn reduce(&self, statistic: Reduction, dims: &[i64], keepdim: bool) -> Result<Self> {
        let count = self.dim();
        let dims: Vec<i64> = if dims.is_empty() {
            (0..count as i64).collect()
        } else {
            dims.iter()
                .map(|&dim| resolve("reduce", dim, count).map(|dim| dim as i64))
                .collect::<Result<_>>()?
        };
        let dims = &dims[..];
        let (name, result) = match statistic {
            Reduction::Sum => ("sum", self.f_sum_dim_intlist(dims, keepdim, None)),
            Reduction::Mean => ("mean", self.f_mean_dim(dims, keepdim, None)),
            Reduction::Max => ("max", self.f_amax(dims, keepdim)),
            Reduction::Min => ("min", self.f_amin(dims, keepdim)),
            Reduction::Norm => ("norm", self.f_norm_scalaropt_dim(2.0, dims, keepdim)),
        };
        named(name, &[self], result)
    }

    fn index_add(&self, dim: i64, index: &Self, source: &Self) -> Result<Self> {
        named("index_add", &[self, index, source], self.f_index_add(dim, index, source))
    }

    fn mse_loss(&self, target: &Self) -> Result<Self> {
        if self.size() != target.size() {
            let reason = format!("input {:?} and target {:?} differ in shape", self.size(), target.size());
            return Err(super::argument("mse_loss", reason));
        }
        named("mse_loss", &[self, target], self.f_mse_loss(target, TorchReduction::Mean))
    }
}
