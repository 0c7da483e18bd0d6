//! Statistics along dims: local ones, merged over the ranks that share the dims.
//!
//! They depend on no operator that is built from them.

mod extreme;
mod p_norm;
mod softmax;
pub(super) mod welford;

use std::ops::Range;
use std::sync::Arc;

use isobar_array::Statistic;
use isobar_collectives::{
    Group, LinearMap, ReduceOp, differentiable, gather_from_parallel_region, reduce_from_parallel_region,
    start,
};
use serde_json::Value;
use tch::{Kind, TchError, Tensor};

use super::index::Owners;
use super::{in_full, operator, refuse, resolve, torch};
use crate::dense::named;
use crate::error::Result;
use crate::layout::{Dim, Layout, Placement};
use crate::rules::Call;
use crate::tensor::ShardTensor;

/// The dims that a statistic goes over, and how its result lies.
pub(super) struct Over {
    dims: Vec<i64>,
    /// Axes that split them.
    pub(super) axes: Vec<usize>,
    /// The result's layout, with the dims of extent 1.
    kept: Layout,
    /// The result's layout, without them where they go.
    result: Layout,
    keepdim: bool,
}

impl Over {
    pub(super) fn new(op: &'static str, x: &ShardTensor, dims: &[i64], keepdim: bool) -> Result<Self> {
        let mut over: Vec<usize> = match dims {
            [] => (0..x.ndim()).collect(),
            dims => dims.iter().map(|&dim| resolve(op, dim, x.ndim())).collect::<Result<_>>()?,
        };
        over.sort_unstable();
        if over.windows(2).any(|pair| pair[0] == pair[1]) {
            return refuse(op, format!("a dim comes twice in {dims:?}"));
        }
        let layout = x.layout();
        let mut axes: Vec<usize> = over.iter().flat_map(|&dim| layout.dims()[dim].axes.clone()).collect();
        axes.sort_unstable();
        let one =
            |(index, dim): (usize, &Dim)| if over.contains(&index) { Dim::whole(1) } else { dim.clone() };
        let kept = layout.with_dims(layout.dims().iter().enumerate().map(one).collect());
        let result = match keepdim {
            true => kept.clone(),
            false => {
                let stay = |(index, dim): (usize, &Dim)| (!over.contains(&index)).then(|| dim.clone());
                layout.with_dims(layout.dims().iter().enumerate().filter_map(stay).collect())
            }
        };
        let dims = over.iter().map(|&dim| dim as i64).collect();
        Ok(Self { dims, axes, kept, result, keepdim })
    }

    /// Elements of the whole that each result is of.
    fn count(&self, x: &ShardTensor) -> i64 {
        self.dims.iter().map(|&dim| x.shape()[dim as usize]).product()
    }

    /// Elements of this rank's part.
    fn local_count(&self, x: &ShardTensor) -> i64 {
        self.dims.iter().map(|&dim| x.local_shape()[dim as usize]).product()
    }

    /// The result of which `local`, with the dims kept, is this rank's summand.
    fn partial(&self, local: Tensor) -> Result<ShardTensor> {
        let local = self.shaped(local)?;
        if self.axes.is_empty() {
            return Ok(ShardTensor::new(local, self.result.clone()));
        }
        let mut placements = self.result.placements().to_vec();
        for &axis in &self.axes {
            placements[axis] = Placement::Partial(ReduceOp::Sum);
        }
        let dims = self.result.dims().to_vec();
        Ok(ShardTensor::new(local, self.result.with_placements(placements, dims)))
    }

    /// The result whose value, with the dims kept, all ranks have.
    fn done(&self, local: Tensor) -> Result<ShardTensor> {
        Ok(ShardTensor::new(self.shaped(local)?, self.result.clone()))
    }

    fn shaped(&self, local: Tensor) -> Result<Tensor> {
        match self.keepdim {
            true => Ok(local),
            false => torch("reduce", local.f_reshape(self.result.local_shape())),
        }
    }

    /// Gathers a local statistic of the ranks that share the dims along a new dim 0; replicated, and counting once.
    fn everyones(&self, layout: &Layout, local: &Tensor) -> Result<Tensor> {
        let stacked = torch("reduce", local.f_unsqueeze(0))?;
        if self.axes.is_empty() {
            return Ok(stacked);
        }
        let group = layout.group_along(&self.axes)?;
        let ones = vec![1; group.size()];
        Ok(gather_from_parallel_region(&stacked, 0, Some(&ones), &group)?)
    }
}

impl ShardTensor {
    /// `statistic` over `dims` (all, where none are named), which stay with extent 1 where `keepdim`.
    ///
    /// Each rank takes it of its part; over split dims, sums and means are returned as partial sums, which
    /// cost nothing until an operator needs their values; other statistics are merged in one small exchange. A sum or mean of a
    /// partial sum stays partial, without an earlier reduction. Partial sums and means of 16 bits are
    /// reduced immediately, in single precision. All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Dims that do not exist or come twice; extrema of no elements; dtypes without the statistic; the errors of the exchange.
    pub fn statistic(&self, statistic: Statistic, dims: &[i64], keepdim: bool) -> Result<Self> {
        let op = statistic.name();
        operator(
            op,
            &[self],
            args!("dim": dims, "keepdim": keepdim, "correction": statistic.correction(), "p": statistic.order()),
            || {
                statistic.check(self.kind(), self.device())?;
                let is_linear = matches!(statistic, Statistic::Sum | Statistic::Mean);
                let x = match is_linear && is_wide_sum(self) {
                    true => self.shallow_clone(),
                    false => self.resolved()?,
                };
                let x = if statistic.is_in_full() { in_full(op, &x)? } else { x };
                let over = Over::new(op, &x, dims, keepdim)?;
                let (local, dims) = (x.local(), over.dims.as_slice());
                match statistic {
                    Statistic::Mean if over.axes.is_empty() => {
                        over.done(named(op, &[local], local.f_mean_dim(dims, true, None))?)
                    }
                    Statistic::Sum | Statistic::Mean => {
                        let over_ranks = !over.axes.is_empty();
                        let is_narrow = matches!(local.kind(), Kind::Half | Kind::BFloat16) && over_ranks;
                        let sum = local.f_sum_dim_intlist(dims, true, is_narrow.then_some(Kind::Float));
                        let sum = match statistic {
                            Statistic::Mean => sum.and_then(|sum| sum.f_div_scalar(over.count(&x) as f64)),
                            _ => sum,
                        };
                        let sum = over.partial(named(op, &[local], sum)?)?;
                        // Partial sums in 16 bits could overflow or lose small terms.
                        if is_narrow { sum.resolved()?.to_kind(local.kind()) } else { Ok(sum) }
                    }
                    Statistic::Max | Statistic::Min => {
                        if over.count(&x) == 0 {
                            return refuse(op, format!("{:?} has no elements along {dims:?}", x.shape()));
                        }
                        let best = extreme::extreme(op, &x, &over, statistic == Statistic::Max)?;
                        over.done(best)
                    }
                    Statistic::Prod => over.merged(&x, prod, |all| all.f_prod_dim_int(0, false, None)),
                    Statistic::Norm => over.merged(
                        &x,
                        |x, dims| x.f_norm_scalaropt_dim(2.0, dims, true),
                        |all| all.f_norm_scalaropt_dim(2.0, [0], false),
                    ),
                    Statistic::PNorm { p } => {
                        statistic.check_order(over.count(&x))?;
                        p_norm::p_norm(op, &x, &over, p)
                    }
                    Statistic::LogSumExp if over.axes.is_empty() => {
                        over.done(named(op, &[local], local.f_logsumexp(dims, true))?)
                    }
                    Statistic::LogSumExp => {
                        if matches!(x.kind(), Kind::ComplexFloat | Kind::ComplexDouble) {
                            let kind = x.kind();
                            return refuse(
                                op,
                                format!(
                                    "input is of dtype {kind:?}, sharded along {dims:?}; expected a real dtype: convert it, or redistribute these dims"
                                ),
                            );
                        }
                        let group = x.layout().group_along(&over.axes)?;
                        let most = extreme::extreme(op, &x.detach(), &over, true)?;
                        // A row of −∞ alone has nothing to be taken about.
                        let shift = torch(
                            op,
                            most.f_isfinite().and_then(|finite| most.f_where_scalarother(&finite, 0.0)),
                        )?;
                        // (`Bool` has no difference.)
                        let terms = local.f_to_kind(shift.kind()).and_then(|x| x.f_sub(&shift)?.f_exp());
                        let terms = torch(op, terms)?;
                        let own = torch(op, terms.f_sum_dim_intlist(dims, true, None))?;
                        let sum = reduce_from_parallel_region(&own, &group)?;
                        over.done(torch(op, sum.f_log().and_then(|log| log.f_add(&shift)))?)
                    }
                    Statistic::Any | Statistic::All => {
                        let some = statistic == Statistic::Any;
                        let test = |x: &Tensor, dims: &[i64]| -> Result<Tensor, TchError> {
                            let ones = x.f_ne(0)?.f_to_kind(Kind::Uint8)?;
                            // Of no elements: none is, and all are.
                            if dims.iter().any(|&dim| x.size()[dim as usize] == 0) {
                                let mut shape = x.size();
                                dims.iter().for_each(|&dim| shape[dim as usize] = 1);
                                return Tensor::f_full(shape, i64::from(!some), (Kind::Uint8, x.device()));
                            }
                            if some { ones.f_amax(dims, true) } else { ones.f_amin(dims, true) }
                        };
                        let found = over.merged(&x, test, |all| {
                            let best = if some { all.f_amax([0], false) } else { all.f_amin([0], false) };
                            // PyTorch's dtype of it.
                            best?.f_to_kind(if x.kind() == Kind::Uint8 { Kind::Uint8 } else { Kind::Bool })
                        })?;
                        Ok(found)
                    }
                    Statistic::Var { correction } | Statistic::Std { correction } => {
                        let root = matches!(statistic, Statistic::Std { .. });
                        if !matches!(x.kind(), Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) {
                            return refuse(
                                op,
                                format!("{:?} has no variance; convert it to a floating dtype", x.kind()),
                            );
                        }
                        // (libtorch warns of each part without elements.)
                        if over.axes.is_empty() && local.numel() > 0 {
                            let dense = match root {
                                true => local.f_std_correction(dims, correction, true),
                                false => local.f_var_correction(dims, correction, true),
                            };
                            return over.done(named(op, &[local], dense)?);
                        }
                        let (_, squares) = welford::moments(op, &x, &over)?;
                        let count = (over.count(&x) - correction).max(0) as f64;
                        let var = torch(op, squares.f_div_scalar(count))?;
                        let result = if root { torch(op, root_of(&var))? } else { var };
                        over.done(torch(op, result.f_to_kind(x.kind()))?)
                    }
                }
            },
        )
    }

    /// The sum of all elements.
    ///
    /// # Errors
    ///
    /// See [`statistic`](Self::statistic).
    pub fn sum(&self) -> Result<Self> {
        self.statistic(Statistic::Sum, &[], false)
    }

    /// The mean of all elements.
    ///
    /// # Errors
    ///
    /// See [`statistic`](Self::statistic).
    pub fn mean(&self) -> Result<Self> {
        self.statistic(Statistic::Mean, &[], false)
    }

    /// The running sums along `dim`. Over a split dim, ranks exchange the sums of their parts only.
    ///
    /// # Errors
    ///
    /// A dim that does not exist; the errors of the exchange.
    pub fn cumsum(&self, dim: i64) -> Result<Self> {
        const OP: &str = "cumsum";
        operator(OP, &[self], args!("dim": dim), || {
            let at = resolve(OP, dim, self.ndim())?;
            let x = in_full(OP, &self.resolved()?.consecutive()?)?;
            let local = torch(OP, x.local().f_cumsum(at as i64, None))?;
            if !x.layout().is_sharded(at) {
                return Ok(Self::new(local, x.layout().clone()));
            }
            let total = torch(OP, x.local().f_sum_dim_intlist([at as i64].as_slice(), true, local.kind()))?;
            let owners = Owners::new(x.layout(), at)?;
            let own = owners.own_part();
            let part = |range: Range<usize>| range.map(|part| owners.rank(part) as i64).collect::<Vec<i64>>();
            let (before, after) = (part(0..own), part(own + 1..owners.sizes.len()));
            let carry =
                differentiable(Arc::new(Others { group: owners.group, take: before, give: after }), &total)?;
            Ok(Self::new(torch(OP, local.f_add(&carry))?, x.layout().clone()))
        })
    }
}

/// The sum of what the ranks with earlier parts have, or of those with later ones, which is the adjoint.
struct Others {
    group: Group,
    take: Vec<i64>,
    give: Vec<i64>,
}

impl LinearMap for Others {
    fn name(&self) -> &'static str {
        "exclusive_scan"
    }

    fn forward(&self, x: &Tensor) -> isobar_collectives::Result<Tensor> {
        let all = start::all_gather_v(&x.f_unsqueeze(0)?, None, 0, &self.group)?.wait()?;
        let wanted = Tensor::f_from_slice(&self.take)?.f_to_device(x.device())?;
        Ok(all.f_index_select(0, &wanted)?.f_sum_dim_intlist([0].as_slice(), false, x.kind())?)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(Self { group: self.group.clone(), take: self.give.clone(), give: self.take.clone() })
    }
}

impl Over {
    /// A statistic that is one of the parts' statistics.
    fn merged(
        &self,
        x: &ShardTensor,
        of_part: impl Fn(&Tensor, &[i64]) -> Result<Tensor, TchError>,
        of_all: impl Fn(&Tensor) -> Result<Tensor, TchError>,
    ) -> Result<ShardTensor> {
        let local = named("reduce", &[x.local()], of_part(x.local(), &self.dims))?;
        if self.axes.is_empty() {
            let local = if local.kind() == Kind::Uint8 {
                torch("reduce", of_all(&torch("reduce", local.f_unsqueeze(0))?))?
            } else {
                local
            };
            return self.done(local);
        }
        let everyones = self.everyones(x.layout(), &local)?;
        self.done(torch("reduce", of_all(&everyones))?)
    }
}

/// Returns whether the tensor is a partial sum of a dtype in which sums of its parts are as precise as its own.
fn is_wide_sum(x: &ShardTensor) -> bool {
    let mut partial = x.placements().iter().filter(|placement| placement.is_partial()).peekable();
    partial.peek().is_some()
        && partial.all(|placement| *placement == Placement::Partial(ReduceOp::Sum))
        && !matches!(x.kind(), Kind::Half | Kind::BFloat16 | Kind::Bool)
}

/// The square root, with a gradient of 0 at 0, as libtorch's standard deviation has it.
fn root_of(var: &Tensor) -> Result<Tensor, TchError> {
    let none = var.f_eq(0.0)?;
    var.f_masked_fill(&none, 1.0)?.f_sqrt()?.f_masked_fill(&none, 0.0)
}

/// The product over several dims.
fn prod(x: &Tensor, dims: &[i64]) -> Result<Tensor, TchError> {
    dims.iter().try_fold(x.shallow_clone(), |x, &dim| x.f_prod_dim_int(dim, true, None))
}

crate::register! {
    /// Sum over the dims `dim`, or over all.
    "sum"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::Sum);
    /// Mean over the dims `dim`, or over all.
    "mean"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::Mean);
    /// Product over the dims `dim`, or over all.
    "prod"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::Prod);
    /// Maximum over the dims `dim`, or over all.
    "amax"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::Max);
    /// Minimum over the dims `dim`, or over all.
    "amin"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::Min);
    /// (Σ |x|ᵖ)^(1/p) over the dims `dim`, or over all, of the order `p` or `ord` (2 if not given); the count of non-zeros for 0, the greatest |x| for "inf", the least for "-inf".
    "norm"(input; dim, keepdim, p; ord) Terms: |call| norm(call);
    /// ln Σ eˣ over the dims `dim`, or over all.
    "logsumexp"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::LogSumExp);
    /// True if any element is not zero, over the dims `dim`, or over all.
    "any"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::Any);
    /// True if all elements are not zero, over the dims `dim`, or over all.
    "all"(input; dim, keepdim) Terms: |call| statistic(call, Statistic::All);
    /// Variance over the dims `dim`, or over all, with `correction`.
    "var"(input; dim, correction, keepdim) Terms:
        |call| statistic(call, Statistic::Var { correction: call.or("correction", 1)? });
    /// Standard deviation over the dims `dim`, or over all, with `correction`.
    "std"(input; dim, correction, keepdim) Terms:
        |call| statistic(call, Statistic::Std { correction: call.or("correction", 1)? });
    /// Sums up to each index of `dim`.
    "cumsum"(input; dim) Rows: |call| call.tensor(0)?.cumsum(call.get("dim")?);
}

fn norm(call: &Call<'_>) -> Result<ShardTensor> {
    call.either("p", "ord")?;
    let name = if call.has("ord")? { "ord" } else { "p" };
    // PyTorch's default by its name.
    let is_frobenius = call.optional::<Value>(name)?.is_some_and(|value| value == "fro");
    let p = if is_frobenius { 2.0 } else { call.or(name, 2.0)? };
    statistic(call, if p == 2.0 { Statistic::Norm } else { Statistic::PNorm { p } })
}

fn statistic(call: &Call<'_>, statistic: Statistic) -> Result<ShardTensor> {
    let dims: Vec<i64> = call.list("dim", Vec::new())?;
    call.tensor(0)?.statistic(statistic, &dims, call.or("keepdim", false)?)
}
