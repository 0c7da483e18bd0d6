//! Sums and other statistics.

use tch::{Device, Kind, Reduction as TorchReduction, Tensor};

use super::by_name::one;
use super::{Array, Unary, argument, named, number, resolve};
use crate::dtypes::{Dtype, check_dtypes};
use crate::error::Result;
use crate::precision::{full, full_kind};

/// A statistic of many numbers, with its options.
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
    /// (Σ |x|ᵖ)^(1/p); the number of elements that are not zero for p = 0, the greatest |x| for p = ∞, the least for p = −∞.
    PNorm {
        /// Order of the norm.
        p: f64,
    },
    /// ln Σ eˣ
    LogSumExp,
    /// True if any element is not zero.
    Any,
    /// True if all elements are not zero.
    All,
}

impl Statistic {
    /// PyTorch's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Prod => "prod",
            Self::Max => "amax",
            Self::Min => "amin",
            Self::Var { .. } => "var",
            Self::Std { .. } => "std",
            Self::Norm | Self::PNorm { .. } => "norm",
            Self::LogSumExp => "logsumexp",
            Self::Any => "any",
            Self::All => "all",
        }
    }

    /// Rejects dtypes for which the statistic is undefined.
    ///
    /// # Errors
    ///
    /// The dtype has no such statistic.
    pub fn check(self, kind: Kind, device: Device) -> Result<()> {
        let dtype = match self {
            Self::Mean | Self::Norm | Self::PNorm { .. } | Self::Var { .. } | Self::Std { .. } => {
                Dtype::FloatingOrComplex
            }
            Self::Max | Self::Min => Dtype::NotComplex,
            Self::Sum | Self::Prod | Self::LogSumExp | Self::Any | Self::All => Dtype::Any,
        };
        check_dtypes(self.name(), [("input", kind, dtype)], device)
    }

    /// Returns true if mixed precision computes it in single precision, as libtorch's autocast does on CUDA.
    pub const fn is_in_full(self) -> bool {
        matches!(self, Self::Sum | Self::Prod | Self::Norm | Self::PNorm { .. } | Self::LogSumExp)
    }

    /// Rejects an order that has no norm of `count` numbers.
    ///
    /// # Errors
    ///
    /// The order is not a number, or negative or infinite for no numbers.
    pub fn check_order(self, count: i64) -> Result<()> {
        let Self::PNorm { p } = self else { return Ok(()) };
        let reason = match (p.is_nan(), count == 0 && (p < 0.0 || p.is_infinite())) {
            (false, false) => return Ok(()),
            (true, _) => "p is NaN; expected a number, \"inf\" or \"-inf\"".to_owned(),
            _ => format!("p is {p} for no elements; expected a finite order of 0 or more"),
        };
        Err(argument(self.name(), reason))
    }

    /// Returns the order of a norm; `None` if it is 2.
    pub fn order(self) -> Option<serde_json::Value> {
        match self {
            Self::PNorm { p } => Some(number(p)),
            _ => None,
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

/// A statistic, under its short name.
pub type Reduction = Statistic;

impl Statistic {
    /// All of them, variances unbiased.
    pub const ALL: [Self; 11] = [
        Self::Sum,
        Self::Mean,
        Self::Prod,
        Self::Max,
        Self::Min,
        Self::Var { correction: 1 },
        Self::Std { correction: 1 },
        Self::Norm,
        Self::LogSumExp,
        Self::Any,
        Self::All,
    ];
}

/// Statistics along dims.
///
/// # Errors
///
/// All methods fail alike: a dim that does not exist, a dtype without the statistic;
/// on sharded arrays also an exchange that fails.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: dims that do not exist, kinds without the statistic"
)]
pub trait Reduce: Sized {
    /// `statistic` over `dims`, which stay with extent 1 where `keepdim`; no dims means all of them.
    ///
    /// ```
    /// use isobar_array::{Reduce, Statistic};
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 6.0]]);
    /// assert_eq!(x.statistic(Statistic::Max, &[0], false)?, Tensor::from_slice(&[3.0, 6.0]));
    /// assert_eq!(x.statistic(Statistic::Mean, &[-1], true)?, Tensor::from_slice2(&[[1.5], [4.5]]));
    /// assert_eq!(x.statistic(Statistic::Sum, &[], false)?.double_value(&[]), 12.0);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn statistic(&self, statistic: Statistic, dims: &[i64], keepdim: bool) -> Result<Self>;

    /// Another name of [`statistic`](Self::statistic).
    fn reduce(&self, statistic: Statistic, dims: &[i64], keepdim: bool) -> Result<Self> {
        self.statistic(statistic, dims, keepdim)
    }

    /// Index (`Int64`) of the greatest element along `dim`, the first of equal ones; over all elements without `dim`.
    ///
    /// ```
    /// use isobar_array::Reduce;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 5.0], [7.0, 2.0]]);
    /// assert_eq!(Reduce::argmax(&x, Some(1), false)?, Tensor::from_slice(&[1_i64, 0]));
    /// assert_eq!(Reduce::argmax(&x, None, false)?.int64_value(&[]), 2);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn argmax(&self, dim: Option<i64>, keepdim: bool) -> Result<Self>
    where
        Self: Array,
    {
        one("argmax", &[self], args!("dim": dim, "keepdim": keepdim))
    }

    /// Index of the least element along `dim`, as [`argmax`](Self::argmax).
    ///
    /// ```
    /// use isobar_array::Reduce;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 5.0], [7.0, 2.0]]);
    /// assert_eq!(Reduce::argmin(&x, Some(0), true)?, Tensor::from_slice2(&[[0_i64, 1]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn argmin(&self, dim: Option<i64>, keepdim: bool) -> Result<Self>
    where
        Self: Array,
    {
        one("argmin", &[self], args!("dim": dim, "keepdim": keepdim))
    }

    /// The sums of the elements up to each one along `dim`.
    ///
    /// ```
    /// use isobar_array::Reduce;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0, 3.0]);
    /// assert_eq!(Reduce::cumsum(&x, 0)?, Tensor::from_slice(&[1.0, 3.0, 6.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn cumsum(&self, dim: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("cumsum", &[self], args!("dim": dim))
    }

    /// This array plus, at the places along `dim` that `index` (`Int64`, one dim) names, the elements of `source`.
    ///
    /// ```
    /// use isobar_array::Reduce;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// // Sums the values of edges at their nodes.
    /// let nodes = Tensor::zeros([3], (Kind::Double, Device::Cpu));
    /// let (ends, edges) = (Tensor::from_slice(&[0_i64, 2, 2]), Tensor::from_slice(&[1.0, 10.0, 20.0]));
    /// assert_eq!(Reduce::index_add(&nodes, 0, &ends, &edges)?, Tensor::from_slice(&[1.0, 0.0, 30.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn index_add(&self, dim: i64, index: &Self, source: &Self) -> Result<Self>
    where
        Self: Array,
    {
        one("index_add", &[self, index, source], args!("dim": dim))
    }

    /// Mean over all elements of (x − target)².
    ///
    /// ```
    /// use isobar_array::Reduce;
    /// use tch::Tensor;
    ///
    /// let (x, target) = (Tensor::from_slice(&[1.0, 2.0]), Tensor::from_slice(&[1.0, 6.0]));
    /// assert_eq!(Reduce::mse_loss(&x, &target)?.double_value(&[]), 8.0);
    /// // Unlike PyTorch's, it never broadcasts.
    /// assert!(Reduce::mse_loss(&x, &target.unsqueeze(1)).is_err());
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn mse_loss(&self, target: &Self) -> Result<Self>
    where
        Self: Array,
    {
        let (shape, target_shape) = (self.shape(), target.shape());
        if shape != target_shape {
            let reason = format!("input {shape:?} and target {target_shape:?} differ in shape");
            return Err(argument("mse_loss", reason));
        }
        let tensors =
            [("input", self), ("target", target)].map(|(name, x)| (name, x.kind(), Dtype::Floating));
        check_dtypes("mse_loss", tensors, self.device())?;
        let full = |x: &Self| x.to_kind(full_kind(x.kind(), self.device()));
        full(self)?.sub(&full(target)?)?.unary(Unary::Square)?.statistic(Statistic::Mean, &[], false)
    }

    /// The sum of all elements.
    ///
    /// ```
    /// use isobar_array::Reduce;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// assert_eq!(Reduce::sum(&x)?.double_value(&[]), 10.0);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn sum(&self) -> Result<Self> {
        self.statistic(Statistic::Sum, &[], false)
    }

    /// The mean of all elements.
    ///
    /// ```
    /// use isobar_array::Reduce;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// assert_eq!(Reduce::mean(&x)?.double_value(&[]), 2.5);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn mean(&self) -> Result<Self> {
        self.statistic(Statistic::Mean, &[], false)
    }
}

impl Reduce for Tensor {
    fn statistic(&self, statistic: Statistic, dims: &[i64], keepdim: bool) -> Result<Self> {
        statistic.check(self.kind(), Tensor::device(self))?;
        let count = self.dim();
        let dims: Vec<i64> = if dims.is_empty() {
            (0..count as i64).collect()
        } else {
            dims.iter()
                .map(|&dim| resolve("reduce", dim, count).map(|dim| dim as i64))
                .collect::<Result<_>>()?
        };
        if let Some(at) = (1..dims.len()).find(|&at| dims[..at].contains(&dims[at])) {
            return Err(argument(statistic.name(), format!("dim {} comes twice in {dims:?}", dims[at])));
        }
        let dims = &dims[..];
        statistic.check_order(dims.iter().map(|&dim| self.size()[dim as usize]).product())?;
        let x = if statistic.is_in_full() {
            named(statistic.name(), &[self], full(self))?
        } else {
            self.shallow_clone()
        };
        let result = match statistic {
            Statistic::Sum => x.f_sum_dim_intlist(dims, keepdim, None),
            Statistic::Mean => x.f_mean_dim(dims, keepdim, None),
            Statistic::Max => x.f_amax(dims, keepdim),
            Statistic::Min => x.f_amin(dims, keepdim),
            Statistic::Norm => x.f_norm_scalaropt_dim(2.0, dims, keepdim),
            Statistic::PNorm { p } => x.f_norm_scalaropt_dim(p, dims, keepdim),
            Statistic::Prod => prod(&x, dims, keepdim),
            Statistic::Var { correction } => x.f_var_correction(dims, correction, keepdim),
            Statistic::Std { correction } => x.f_std_correction(dims, correction, keepdim),
            Statistic::LogSumExp => x.f_logsumexp(dims, keepdim),
            Statistic::Any => x.f_any_dims(dims, keepdim),
            Statistic::All => x.f_all_dims(dims, keepdim),
        };
        named(statistic.name(), &[self], result)
    }

    fn argmax(&self, dim: Option<i64>, keepdim: bool) -> Result<Self> {
        named("argmax", &[self], self.f_argmax(dim, keepdim))
    }

    fn argmin(&self, dim: Option<i64>, keepdim: bool) -> Result<Self> {
        named("argmin", &[self], self.f_argmin(dim, keepdim))
    }

    fn cumsum(&self, dim: i64) -> Result<Self> {
        named("cumsum", &[self], full(self).and_then(|x| x.f_cumsum(dim, None)))
    }

    fn index_add(&self, dim: i64, index: &Self, source: &Self) -> Result<Self> {
        named("index_add", &[self, index, source], self.f_index_add(dim, index, source))
    }

    fn mse_loss(&self, target: &Self) -> Result<Self> {
        if self.size() != target.size() {
            let reason = format!("input {:?} and target {:?} differ in shape", self.size(), target.size());
            return Err(argument("mse_loss", reason));
        }
        named("mse_loss", &[self, target], self.f_mse_loss(target, TorchReduction::Mean))
    }
}

/// The product along dims, one after the other: libtorch has it for one.
fn prod(x: &Tensor, dims: &[i64], keepdim: bool) -> Result<Tensor, tch::TchError> {
    let mut order = dims.to_vec();
    order.sort_unstable();
    let mut y = x.shallow_clone();
    for dim in order.into_iter().rev() {
        y = y.f_prod_dim_int(dim, keepdim, None)?;
    }
    Ok(y)
}
