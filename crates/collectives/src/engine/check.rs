//! Arguments, checked before anything is sent.

use tch::{Kind, Tensor};

use crate::engine::call::Call;
use crate::error::Result;
use crate::local::reduce::ReduceOp;

impl Call {
    /// `dim` counted from the front.
    pub(crate) fn dim(&self, tensor: &Tensor, dim: i64) -> Result<usize> {
        self.defined(tensor)?;
        self.describe(tensor);
        let dims = tensor.dim() as i64;
        let found = |dim: i64| {
            self.recorded.along(dim as usize);
            self.agree_on(dim);
            Ok(dim as usize)
        };
        match dim {
            d if (0..dims).contains(&d) => found(d),
            d if (-dims..0).contains(&d) => found(d + dims),
            _ if dims == 0 => {
                Err(self.refuse(format!("dim {dim} is out of range for a tensor without dims")))
            }
            _ => Err(self.refuse(format!(
                "dim {dim} is out of range for a tensor of shape {:?}; expected {} to {}",
                tensor.size(),
                -dims,
                dims - 1
            ))),
        }
    }

    /// Keeps what the operation is of, for whoever asks when it does not end.
    pub(crate) fn describe(&self, tensor: &Tensor) {
        if tensor.defined() {
            self.recorded.describe(tensor.kind(), &tensor.size());
        }
    }

    /// A tensor that must be one.
    pub(crate) fn defined(&self, tensor: &Tensor) -> Result<()> {
        match tensor.defined() {
            true => Ok(()),
            false => Err(self.refuse("the tensor is undefined".into())),
        }
    }

    /// A rank that must be in the group.
    pub(crate) fn member(&self, what: &str, rank: usize) -> Result<()> {
        self.recorded.root(rank);
        self.agree_on(rank);
        match rank < self.group().size() {
            true => Ok(()),
            false => Err(self.refuse(format!("{what} {rank} is not a rank below {}", self.group().size()))),
        }
    }

    /// Sizes for each rank: those given, or this rank's own extent for all.
    pub(crate) fn sizes(&self, sizes: Option<&[i64]>, own: i64) -> Result<Vec<i64>> {
        let ranks = self.group().size();
        let Some(sizes) = sizes else { return Ok(vec![own; ranks]) };
        if sizes.len() != ranks {
            return Err(self.refuse(format!(
                "{} sizes were given; expected one for each of {ranks} ranks",
                sizes.len()
            )));
        }
        if sizes.iter().any(|&s| s < 0) {
            return Err(self.refuse(format!("the sizes {sizes:?} hold a negative one")));
        }
        if sizes.iter().try_fold(0_i64, |sum, &size| sum.checked_add(size)).is_none() {
            return Err(self.refuse(format!("the sizes {sizes:?} have no sum that is an extent")));
        }
        self.recorded.sizes(sizes);
        Ok(sizes.to_vec())
    }

    /// Sizes that a tensor's extent is cut into: those given, or equal parts.
    pub(crate) fn parts(&self, sizes: Option<&[i64]>, extent: i64) -> Result<Vec<i64>> {
        let ranks = self.group().size() as i64;
        if sizes.is_none() && extent % ranks != 0 {
            return Err(self.refuse(format!(
                "the extent {extent} does not split into {ranks} equal parts; give the sizes (chunk and balanced make some)"
            )));
        }
        let sizes = self.sizes(sizes, extent / ranks)?;
        let sum: i64 = sizes.iter().sum();
        match sum == extent {
            true => Ok(sizes),
            false => {
                Err(self.refuse(format!("the sizes {sizes:?} sum to {sum}; expected the extent {extent}")))
            }
        }
    }

    /// Checks the extent of this rank's own part.
    pub(crate) fn own_extent(&self, tensor: &Tensor, dim: usize, sizes: &[i64]) -> Result<()> {
        let (own, expected) = (tensor.size()[dim], sizes[self.group().rank()]);
        match own == expected {
            true => Ok(()),
            false => Err(self.refuse(format!(
                "the tensor of shape {:?} has extent {own} along dim {dim}; expected {expected}, this rank's of the sizes {sizes:?}",
                tensor.size()
            ))),
        }
    }

    /// Checks that a tensor's values can be combined by `op`.
    pub(crate) fn reducible(&self, op: ReduceOp, tensor: &Tensor) -> Result<()> {
        self.defined(tensor)?;
        self.describe(tensor);
        self.reducible_kind(op, tensor.kind())
    }

    /// Checks that a dtype supports a reduction.
    pub(crate) fn reducible_kind(&self, op: ReduceOp, kind: Kind) -> Result<()> {
        self.recorded.reduction(op);
        self.agree_on(op);
        let complex = matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble);
        let float = matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) || complex;
        let integer = matches!(kind, Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64);
        let allowed = match op {
            ReduceOp::Sum => float || integer,
            ReduceOp::Avg => float,
            ReduceOp::Product => float || integer || kind == Kind::Bool,
            ReduceOp::Min | ReduceOp::Max => (float && !complex) || integer || kind == Kind::Bool,
        };
        match allowed {
            true => Ok(()),
            false => Err(self.refuse(format!("values of dtype {kind:?} have no {op:?} over ranks"))),
        }
    }
}
